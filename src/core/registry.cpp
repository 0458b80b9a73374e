#include "core/registry.h"

#include <vector>

namespace moegemm {

std::span<const Backend* const> all_backends() {
  static const std::vector<const Backend*> backends = [] {
    std::vector<const Backend*> all;
#if MOEGEMM_HAS_CUDA
    all = cuda_backends();
#endif
    all.insert(all.end(), {&cpu_backend(), &reference_backend()});
    return all;
  }();
  return backends;
}

const Passes* passes_on(DeviceType type) {
  if (type == DeviceType::kCpu) return &cpu_passes();
  if (type == DeviceType::kMeta) return &meta_passes();
#if MOEGEMM_HAS_CUDA
  return &cuda_passes();
#else
  return nullptr;
#endif
}

}  // namespace moegemm
