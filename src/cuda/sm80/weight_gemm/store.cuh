#pragma once

#include "cuda/sm80/tile/store.cuh"
#include "cuda/sm80/weight_gemm/params.h"

/// Where the results of dW go.
namespace moegemm::cuda::sm80 {

template <typename Traits>
__device__ __forceinline__ void store_weights(const WeightGemmParams& params,
                                              const WeightTile& tile,
                                              const Accumulators<Traits>& acc) {
  using Shape = typename Traits::Shape;
  OutputView out = params.out;
  const std::int64_t bytes =
      tile.expert * params.expert_stride * (out.is_fp32 ? 4 : Traits::kElementBytes);
  out.data = static_cast<std::byte*>(out.data) + bytes;
  const int first = tile.a_col + warp_row<Shape>(Shape::kRowBlocks) + lane_row<Traits>(0);
  int rows[2 * Shape::kRowBlocks];
#pragma unroll
  for (int i = 0; i < 2 * Shape::kRowBlocks; ++i) {
    const int row = first + lane_row<Traits>(i) - lane_row<Traits>(0);
    rows[i] = row < params.n ? row : -1;
  }
  store_tile<Traits>(acc, Shape::kRowBlocks, out, rows, tile.b_col);
}

}  // namespace moegemm::cuda::sm80
