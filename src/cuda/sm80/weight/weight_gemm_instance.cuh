#pragma once

#include "cuda/sm80/plan/instance.h"
#include "cuda/sm80/tile/element_type.h"
#include "cuda/sm80/weight/weight_gemm.cuh"

namespace moegemm::cuda::sm80 {

/// dW.
template <Op O, Math M, Loads L, typename Shape, DType D>
const void* kernel_function() {
  static_assert(O == Op::kDw);
  using Traits = GemmTraits<Shape, ElementType<D>, M, Major::kOuter, Major::kOuter, L>;
  return reinterpret_cast<const void*>(&weight_gemm_kernel<Traits>);
}

}  // namespace moegemm::cuda::sm80
