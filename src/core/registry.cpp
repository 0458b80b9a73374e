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

const RowKernels* row_kernels(DeviceType type) {
  if (type == DeviceType::kCpu) return &cpu_row_kernels();
#if MOEGEMM_HAS_CUDA
  return &cuda_row_kernels();
#else
  return nullptr;
#endif
}

}  // namespace moegemm
