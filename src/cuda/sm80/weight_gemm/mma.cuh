#pragma once

#include "cuda/sm80/tile/mma.cuh"
#include "cuda/sm80/weight_gemm/load.cuh"

/// The contraction of one tile of dW, over the rows of its expert.
namespace moegemm::cuda::sm80 {

template <typename Traits, typename Feed>
__device__ __forceinline__ void multiply_rows(const WeightGemmParams& params,
                                              const WeightTile& tile, Feed& feed,
                                              Accumulators<Traits>& acc) {
  constexpr int kRowBlocks = Traits::Shape::kRowBlocks;
  const int blocks = depth_blocks<Traits>(tile);
  if (params.multiply) {
    multiply_tile<Traits, kRowBlocks, true>(acc, feed, blocks);
  } else {
    multiply_tile<Traits, kRowBlocks, false>(acc, feed, blocks);
  }
}

}  // namespace moegemm::cuda::sm80
