#pragma once

#include <cstdint>

#include "moegemm/ops.h"
#include "moegemm/tensor.h"

namespace moegemm {

/// Copies inside a device's memory, in order with the launches on `context`.
void copy_on_device(Device device, const ExecutionContext& context, void* to, const void* from,
                    std::int64_t bytes);

/// Copies to the host, after what `context` was told before, and waits for it.
void copy_to_host(Device device, const ExecutionContext& context, void* to, const void* from,
                  std::int64_t bytes);

// Defined in builds with CUDA.
void cuda_copy_on_device(Device device, void* stream, void* to, const void* from,
                         std::int64_t bytes);
void cuda_copy_to_host(Device device, void* stream, void* to, const void* from, std::int64_t bytes);

}  // namespace moegemm
