#include "moegemm/execution.h"

#if MOEGEMM_HAS_CUDA
#include "cuda/backend/launch/loading.h"
#endif

namespace moegemm {

int load_kernels([[maybe_unused]] Device device) {
#if MOEGEMM_HAS_CUDA
  if (device.type == DeviceType::kCuda) return cuda::load_listed_kernels(device.index);
#endif
  return 0;
}

}  // namespace moegemm
