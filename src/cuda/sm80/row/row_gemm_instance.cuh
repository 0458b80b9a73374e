#pragma once

#include "cuda/sm80/plan/instance.h"
#include "cuda/sm80/row/row_gemm.cuh"
#include "cuda/sm80/tile/element_type.h"

namespace moegemm::cuda::sm80 {

/// Forward and dX.
template <Op O, Math M, Loads L, typename Shape, DType D>
const void* kernel_function() {
  // W_e is [N, K]: its rows are K-contiguous, which is the contraction in forward and the output
  // columns in dX.
  constexpr Major kWeights = O == Op::kForward ? Major::kDepth : Major::kOuter;
  using Traits = GemmTraits<Shape, ElementType<D>, M, Major::kDepth, kWeights, L>;
  return reinterpret_cast<const void*>(&row_gemm_kernel<Traits>);
}

}  // namespace moegemm::cuda::sm80
