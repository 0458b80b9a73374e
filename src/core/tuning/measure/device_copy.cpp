#include "core/tuning/measure/device_copy.h"

#include <cstring>

namespace moegemm {

void copy_on_device(Device device, const ExecutionContext& context, void* to, const void* from,
                    std::int64_t bytes) {
#if MOEGEMM_HAS_CUDA
  if (device.type == DeviceType::kCuda) {
    return cuda_copy_on_device(device, context.stream, to, from, bytes);
  }
#endif
  static_cast<void>(device);
  static_cast<void>(context);
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void copy_to_host(Device device, const ExecutionContext& context, void* to, const void* from,
                  std::int64_t bytes) {
#if MOEGEMM_HAS_CUDA
  if (device.type == DeviceType::kCuda) {
    return cuda_copy_to_host(device, context.stream, to, from, bytes);
  }
#endif
  static_cast<void>(device);
  static_cast<void>(context);
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace moegemm
