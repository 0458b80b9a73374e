#include "cuda/passes/passes.h"

#include "core/registry.h"

namespace moegemm {

const Passes& cuda_passes() {
  static const cuda::CudaPasses passes;
  return passes;
}

}  // namespace moegemm
