#pragma once

#include <cstdint>
#include <string>

#include "moegemm/tensor.h"

namespace moegemm::cuda {

/// What planning needs to know about a GPU.
struct DeviceFacts {
  int ordinal = 0;
  std::string name;
  int major = 0;  ///< compute capability
  int minor = 0;
  int multiprocessors = 0;
  std::int64_t memory_bytes = 0;
  std::int64_t shared_memory_bytes = 0;  ///< most that one block may opt in to
  std::int64_t l2_bytes = 0;
  double clock_hz = 0;                                  ///< highest of the multiprocessors
  double bytes_per_second = 0;                          ///< of device memory, by its bus
  std::int64_t multiprocessor_shared_memory_bytes = 0;  ///< for all blocks on a multiprocessor
};

/// Visible devices; 0 when there is no driver. All facts are read once, at the first call of any of
/// these functions; no context is created for it.
int device_count();

/// nullptr if there is no such device. The pointer stays valid.
const DeviceFacts* device_facts(int ordinal);

/// "no CUDA device: " and the reason; empty when there is a device.
const std::string& why_no_device();

/// Looks up a device that kernels are to run on. Returns why it is none of the visible GPUs; if it
/// is one, nothing and its facts in `facts`.
std::string find_device(Device device, const DeviceFacts*& facts);

/// "NVIDIA H200 has compute capability 9.0", the beginning of why some kernels do not run there.
std::string capability_of(const DeviceFacts& facts);

/// Makes a device current for a scope; one cheap query if it is already. Throws Error(kRuntime) if
/// there is no such device.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;  ///< to return to; -1: nothing was changed
};

}  // namespace moegemm::cuda
