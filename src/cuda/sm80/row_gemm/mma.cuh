#pragma once

#include "cuda/sm80/row_gemm/params.h"
#include "cuda/sm80/tile/fma.cuh"
#include "cuda/sm80/tile/mma.cuh"

/// The contraction of one tile of a row GEMM: a tile pays for its rows, not for the largest tile.
namespace moegemm::cuda::sm80 {

/// The fewest row blocks of a warp that hold `rows` rows.
template <typename Shape>
__device__ __forceinline__ int row_blocks_for(int rows) {
  return ceil_div(rows, Shape::kGranule) * Shape::kHeightStep;
}

/// Multiplies `row_blocks` row blocks.
template <typename Traits, int RowBlocks, typename Feed>
__device__ __forceinline__ void multiply_rows(const RowGemmParams& params, int row_blocks,
                                              Feed& feed, Accumulators<Traits>& acc) {
  if constexpr (RowBlocks > Traits::Shape::kHeightStep) {
    if (row_blocks < RowBlocks) {
      multiply_rows<Traits, RowBlocks - Traits::Shape::kHeightStep>(params, row_blocks, feed, acc);
      return;
    }
  }
  const int blocks = ceil_div(params.depth, Traits::kDepth) + params.low_blocks;
  if constexpr (Traits::kMath == Math::kFloat) {
    multiply_float_rows<Traits, RowBlocks>(acc, feed, blocks);
  } else {
    multiply_tile<Traits, RowBlocks, false>(acc, feed, blocks);
  }
}

}  // namespace moegemm::cuda::sm80
