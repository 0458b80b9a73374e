#pragma once

#include "cuda/sm80/tile/multiply.cuh"
#include "cuda/sm80/tile/shared_layout.h"
#include "cuda/sm80/tile/tile_feed.cuh"
#include "cuda/sm80/tile/tile_store.cuh"
#include "cuda/sm80/weight/weight_gemm_load.cuh"

/// dW_e = dY_e^T X_e on every GPU from sm_80 up, all experts in one persistent launch. The warps'
/// roles are those of row_gemm.cuh; both operands are read as they lie in memory, rows of the
/// contraction with contiguous columns, and turned by ldmatrix.
namespace moegemm::cuda::sm80 {

template <typename Traits>
__device__ __forceinline__ void build_expert_table(const WeightGemmParams& params,
                                                   const ExpertTable& table,
                                                   int (&counts)[kSizeClasses]) {
  scan_segments(params.m_sizes, params.experts, params.total_rows, 1, table.row_prefix, nullptr);
  __syncwarp();
  // A tile that starts last can make the launch this much longer: 1/32 of a block's share at most.
  const float share = static_cast<float>(params.total_rows / Traits::kDepth) *
                      static_cast<float>(params.tiling.per_expert()) /
                      static_cast<float>(gridDim.x);
  order_large_first(table.row_prefix, params.experts, Traits::kDepth, static_cast<int>(share / 32),
                    counts, table.order);
}

template <typename Traits>
__device__ __forceinline__ void store_weights(const WeightGemmParams& params,
                                              const WeightTile& tile,
                                              const Accumulators<Traits>& acc) {
  using Shape = typename Traits::Shape;
  OutputView out = params.out;
  const std::int64_t bytes =
      tile.expert * params.expert_stride * (out.is_fp32 ? 4 : Traits::kElementBytes);
  out.data = static_cast<std::byte*>(out.data) + bytes;
  const int first = tile.n + warp_row<Shape>(Shape::kRowBlocks) + lane_id() / 4;
  int rows[2 * Shape::kRowBlocks];
#pragma unroll
  for (int i = 0; i < 2 * Shape::kRowBlocks; ++i) {
    rows[i] = first + i * 8 < params.n ? first + i * 8 : -1;
  }
  store_tile<Traits>(acc, Shape::kRowBlocks, out, rows, tile.k);
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::Shape::kThreads, Traits::Shape::kBlocksPerMultiprocessor)
    weight_gemm_kernel(const __grid_constant__ WeightGemmParams params) {
  using Shape = typename Traits::Shape;
  using Layout = WeightGemmLayout<Shape, Traits::kElementBytes>;
  using Loader = WeightLoader<Traits>;
  static_assert(sizeof(WeightTile) <= kTileBytes);
  extern __shared__ __align__(kStageAlignment) std::byte shared[];
  auto* tiles = reinterpret_cast<WeightTile*>(shared + Layout::kTiles);
  const ExpertTable table = {
      reinterpret_cast<int*>(shared + Layout::kRowPrefix),
      reinterpret_cast<unsigned short*>(shared + Layout::order(params.experts))};
  if (threadIdx.x < kWarpSize) {
    build_expert_table<Traits>(params, table,
                               *reinterpret_cast<int(*)[kSizeClasses]>(shared + Layout::kCounts));
  }
  __syncthreads();

  Loader loader(params, tiles, *reinterpret_cast<RowTable<Traits>*>(shared + Layout::kRowTable),
                reinterpret_cast<float*>(shared + Layout::kScales));
  WeightScheduler<Shape> scheduler(params, table);
  TileFeed<Traits, Loader, WeightScheduler<Shape>> feed(loader, scheduler, shared, tiles);
  for (int number = 0;; ++number) {
    const WeightTile& tile = tiles[number % kTileSlots];  // not copied: registers are short here
    if (tile.is_end()) break;
    Accumulators<Traits> acc;
    clear<Traits>(acc);
    if (params.multiply) {
      multiply_tile<Traits, Shape::kRowBlocks, true>(acc, feed, Loader::blocks_of(tile));
    } else {
      multiply_tile<Traits, Shape::kRowBlocks, false>(acc, feed, Loader::blocks_of(tile));
    }
    store_weights<Traits>(params, tile, acc);
  }
  scheduler.leave();
}

}  // namespace moegemm::cuda::sm80
