#pragma once

#include <type_traits>

#include "cuda/sm90/row_gemm/instance.h"
#include "cuda/sm90/row_gemm/kernel.cuh"

namespace moegemm::cuda::sm90 {

template <Op O, typename TileT, RowLoads Loads, DType D>
RowGemmFunctions row_gemm_functions() {
  using T = std::conditional_t<D == DType::kFloat16, __half, __nv_bfloat16>;
  // W_e is [N, K]: its rows are K-contiguous, which is the contraction in forward and the output
  // columns in dX.
  constexpr ptx::Major kMajor = O == Op::kForward ? ptx::Major::kK : ptx::Major::kMn;
  RowGemmFunctions functions;
  if constexpr (Loads != RowLoads::kGathered) {
    functions.in_order = reinterpret_cast<const void*>(&row_gemm_kernel<T, TileT, kMajor, false>);
    if constexpr (!TileT::kActivated && !TileT::kAddsBias) {
      functions.biased =
          reinterpret_cast<const void*>(&row_gemm_kernel<T, BiasedTile<TileT>, kMajor, false>);
    }
  }
  if constexpr (Loads != RowLoads::kInOrder) {
    functions.gathered = reinterpret_cast<const void*>(&row_gemm_kernel<T, TileT, kMajor, true>);
  }
  return functions;
}

}  // namespace moegemm::cuda::sm90
