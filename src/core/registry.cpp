#include "core/registry.h"

#include <array>

namespace moegemm {

std::span<const Backend* const> all_backends() {
  static const std::array backends = {
#if MOEGEMM_HAS_CUDA
    &sm90_backend(),
    &sm80_backend(),
#endif
    &cpu_backend(),
    &reference_backend(),
  };
  return backends;
}

const Passes* passes_on(DeviceType type) {
  if (type == DeviceType::kCpu) return &cpu_passes();
#if MOEGEMM_HAS_CUDA
  return &cuda_passes();
#else
  return nullptr;
#endif
}

}  // namespace moegemm
