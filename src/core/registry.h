#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/backend.h"
#include "moegemm/info.h"

/// Who is compiled in. Each backend folder defines its function; registry.cpp lists them.
namespace moegemm {

const Backend& reference_backend();
const Backend& cpu_backend();
const Passes& cpu_passes();
const Passes& meta_passes();
CpuInfo query_cpu();

// Defined in builds with CUDA.
std::vector<const Backend*> cuda_backends();  ///< best first
const Passes& cuda_passes();
std::vector<GpuInfo> query_gpus(std::string* why_none);

/// Every backend, best first for its device type.
std::span<const Backend* const> all_backends();
/// nullptr when nothing compiled serves this device type.
const Passes* passes_on(DeviceType type);
/// The same, or a refusal.
const Passes& passes_for(Device device);

}  // namespace moegemm
