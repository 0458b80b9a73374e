#pragma once

#include "cuda/sm80/tile/multiply.cuh"
#include "cuda/sm80/tile/shared_layout.h"
#include "cuda/sm80/tile/tile_feed.cuh"
#include "cuda/sm80/tile/tile_store.cuh"
#include "cuda/sm80/weight/weight_gemm_load.cuh"
#include "cuda/sm80/weight/weight_stream.cuh"

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

template <typename Traits, typename Feed>
__device__ __forceinline__ void compute_weights(const WeightGemmParams& params,
                                                const WeightTile& tile, Feed& feed) {
  using Shape = typename Traits::Shape;
  Accumulators<Traits> acc;
  clear<Traits>(acc);
  const int blocks = depth_blocks<Traits>(tile);
  if (params.multiply) {
    multiply_tile<Traits, Shape::kRowBlocks, true>(acc, feed, blocks);
  } else {
    multiply_tile<Traits, Shape::kRowBlocks, false>(acc, feed, blocks);
  }
  store_weights<Traits>(params, tile, acc);
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::Shape::kThreads, Traits::Shape::kBlocksPerMultiprocessor)
    weight_gemm_kernel(const __grid_constant__ WeightGemmParams params) {
  using Shape = typename Traits::Shape;
  using Layout = WeightGemmLayout<Shape, Traits::kElementBytes>;
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
  auto* scales = reinterpret_cast<float*>(shared + Layout::kScales);
  auto* ring = reinterpret_cast<StageRing<Shape>*>(shared + Layout::kRing);
  if constexpr (Shape::kLoadWarps > 0) {
    if (threadIdx.x == Shape::kFirstCopyThread) ring->prepare();
  }
  __syncthreads();

  if constexpr (Shape::kLoadWarps > 0) {
    if (threadIdx.x >= Shape::kFirstCopyThread) {
      ptx::setmaxnreg_dec<kLoadRegisters>();
      WeightStreamLoader<Traits> loader(params, scales);
      WeightScheduler<Shape> scheduler(params, table);
      copy_tiles(loader, scheduler, shared, tiles, *ring);
      scheduler.leave();
      return;
    }
    ptx::setmaxnreg_inc<kMultiplyRegisters>();
    StageReader<Shape> feed(shared, *ring, scales, Traits::kDepth);
    for (int number = 0;; ++number) {
      feed.wait();
      const WeightTile& tile = tiles[number % kTileSlots];
      if (tile.is_end()) return;
      compute_weights<Traits>(params, tile, feed);
    }
  } else {
    using Loader = WeightLoader<Traits>;
    auto* rows = reinterpret_cast<RowTable<Traits>*>(shared + Layout::kRowTable);
    Loader loader(params, tiles, *rows, scales);
    WeightScheduler<Shape> scheduler(params, table);
    TileFeed<Traits, Loader, WeightScheduler<Shape>> feed(loader, scheduler, shared, tiles);
    for (int number = 0;; ++number) {
      const WeightTile& tile = tiles[number % kTileSlots];  // not copied: registers are short here
      if (tile.is_end()) break;
      compute_weights<Traits>(params, tile, feed);
    }
    scheduler.leave();
  }
}

}  // namespace moegemm::cuda::sm80
