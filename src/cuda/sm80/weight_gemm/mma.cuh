#pragma once

#include "cuda/sm80/tile/fma.cuh"
#include "cuda/sm80/tile/mma.cuh"
#include "cuda/sm80/weight_gemm/load.cuh"

/// The contraction of one tile of dW, over the rows of its expert.
namespace moegemm::cuda::sm80 {

template <typename Traits, typename Feed>
__device__ __forceinline__ void multiply_rows(const WeightGemmParams& params,
                                              const WeightTile& tile, Feed& feed,
                                              Accumulators<Traits>& acc) {
  const auto multiply = [&]<bool Scaled>() {
    const int blocks = depth_blocks<Traits>(tile);
    if constexpr (Traits::kMath == Math::kFloat) {
      multiply_float_depths<Traits, Scaled>(acc, feed, blocks);
    } else {
      multiply_tile<Traits, Traits::Shape::kRowBlocks, Scaled>(acc, feed, blocks);
    }
  };
  if (params.multiply) {
    multiply.template operator()<true>();
  } else {
    multiply.template operator()<false>();
  }
}

}  // namespace moegemm::cuda::sm80
