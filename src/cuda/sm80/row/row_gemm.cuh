#pragma once

#include "cuda/sm80/row/row_gemm_load.cuh"
#include "cuda/sm80/tile/multiply.cuh"
#include "cuda/sm80/tile/router_weight.cuh"
#include "cuda/sm80/tile/shared_layout.h"
#include "cuda/sm80/tile/tile_feed.cuh"
#include "cuda/sm80/tile/tile_store.cuh"

// clang-format off
/// Forward and dX on every GPU from sm_80 up: out[rows of expert e] = rows W_e^T (or W_e), all experts
/// in one persistent launch. Rows lie on mma.sync's M side, weights on its N side.
///
/// | warps | role                       | waits for                                   | signals         |
/// |-------|----------------------------|---------------------------------------------|-----------------|
/// | all   | cp.async, mma.sync, store  | its own copies, then all threads (1 barrier | the same        |
/// |       |                            | per block of depth)                         | barrier         |
/// | 0     | also takes and decodes     | nothing: tiles are decoded several ahead    | the same        |
/// |       | tiles                      |                                             | barrier         |
///
/// Copies run ahead into the next tiles, so the stores of one tile hide the first loads of the next;
/// two blocks on a multiprocessor hide each other's stores and barriers.
// clang-format on
namespace moegemm::cuda::sm80 {

/// Where this thread's results go: half h of row block i at 2 i + h.
template <typename Traits>
struct RowTargets {
  static constexpr int kHalves = 2 * Traits::Shape::kRowBlocks;
  int rows[kHalves];      ///< of the output, negative for none
  float scales[kHalves];  ///< set if results are multiplied

  __device__ __forceinline__ void locate(const RowGemmParams& params, const RowTile& tile,
                                         int row_blocks) {
    const int first = warp_row<typename Traits::Shape>(row_blocks) + lane_id() / 4;
    const bool indexed = params.scatter || params.multiply;
    int flat[kHalves];
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      const int local = first + i * 8;
      const bool inside = i < 2 * row_blocks && local < tile.rows;
      flat[i] = inside && indexed
                    ? flat_row(params.gather_indices, tile.row + local, params.total_rows)
                    : -1;
      rows[i] = params.scatter ? flat[i] : (inside ? tile.row + local : -1);
    }
    if (!params.multiply) return;
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      scales[i] = flat[i] < 0 ? 1.0f
                              : router_weight<typename Traits::Element>(
                                    params.topk_weights, params.weights_are_fp32, flat[i]);
    }
  }

  __device__ __forceinline__ void scale(Accumulators<Traits>& acc) const {
#pragma unroll
    for (int i = 0; i < Traits::Shape::kRowBlocks; ++i) {
#pragma unroll
      for (auto& block : acc[i]) {
#pragma unroll
        for (int h = 0; h < 4; ++h) block[h] *= scales[2 * i + h / 2];
      }
    }
  }
};

/// Adds the bias of the tile's expert to every row.
template <typename Traits>
__device__ __forceinline__ void add_bias(const RowGemmParams& params, const RowTile& tile,
                                         Accumulators<Traits>& acc) {
  using Shape = typename Traits::Shape;
  const auto* bias =
      static_cast<const typename Traits::Element*>(params.bias) + tile.expert * params.bias_stride;
  const int first = tile.feature + warp_col<Shape>() + lane_id() % 4 * 2;
#pragma unroll
  for (int j = 0; j < Shape::kColBlocks; ++j) {
    const int col = first + j * 8;
    const float low = col < params.out.cols ? static_cast<float>(__ldg(bias + col)) : 0.0f;
    const float high =
        col + 1 < params.out.cols ? static_cast<float>(__ldg(bias + col + 1)) : 0.0f;
#pragma unroll
    for (int i = 0; i < Shape::kRowBlocks; ++i) {
      acc[i][j][0] += low;
      acc[i][j][1] += high;
      acc[i][j][2] += low;
      acc[i][j][3] += high;
    }
  }
}

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
  multiply_tile<Traits, RowBlocks, false>(acc, feed, ceil_div(params.depth, Traits::kDepth));
}

template <typename Traits, typename Feed>
__device__ __forceinline__ void compute_tile(const RowGemmParams& params, const RowTile& tile,
                                             Feed& feed) {
  using Shape = typename Traits::Shape;
  // Small tiles are short: their indices are fetched under the multiplications. Large ones have no
  // registers for that.
  constexpr bool kLocateFirst = Shape::kRowBlocks <= 2;
  const int row_blocks = row_blocks_for<Shape>(tile.rows);
  RowTargets<Traits> targets;
  if constexpr (kLocateFirst) targets.locate(params, tile, row_blocks);
  Accumulators<Traits> acc;
  clear<Traits>(acc);
  multiply_rows<Traits, Shape::kRowBlocks>(params, row_blocks, feed, acc);
  if (params.bias) add_bias<Traits>(params, tile, acc);
  if constexpr (!kLocateFirst) targets.locate(params, tile, row_blocks);
  if (params.multiply) targets.scale(acc);
  store_tile<Traits>(acc, row_blocks, params.out, targets.rows, tile.feature);
}

/// Rows past the last segment are zero; the warps of all blocks share them.
template <typename Traits>
__device__ __forceinline__ void zero_padding_rows(const RowGemmParams& params, int routed_rows) {
  constexpr int kWarps = Traits::Shape::kWarps;
  const OutputView& out = params.out;
  const int element_bytes = out.is_fp32 ? 4 : Traits::kElementBytes;
  const int step = gridDim.x * kWarps;
  for (long long position = routed_rows + static_cast<int>(blockIdx.x) * kWarps + warp_id();
       position < params.total_rows; position += step) {
    const int row = params.scatter ? flat_row(params.gather_indices, static_cast<int>(position),
                                              params.total_rows)
                                   : static_cast<int>(position);
    if (row < 0) continue;
    std::byte* line = static_cast<std::byte*>(out.data) + row * out.stride * element_bytes;
    using Unit = std::conditional_t<kVectors<Traits>, uint2, unsigned short>;  // divides any row
    const std::int64_t units = static_cast<std::int64_t>(out.cols) * element_bytes / sizeof(Unit);
    for (std::int64_t i = lane_id(); i < units; i += kWarpThreads) {
      reinterpret_cast<Unit*>(line)[i] = Unit{};
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::Shape::kThreads, Traits::Shape::kBlocksPerMultiprocessor)
    row_gemm_kernel(const __grid_constant__ RowGemmParams params) {
  using Shape = typename Traits::Shape;
  using Layout = RowGemmLayout<Shape>;
  static_assert(sizeof(RowTile) <= kTileBytes);
  extern __shared__ __align__(128) std::byte shared[];
  auto* tiles = reinterpret_cast<RowTile*>(shared + Layout::kTiles);
  auto* starts = reinterpret_cast<SegmentStart*>(shared + Layout::kStarts);
  if (threadIdx.x < kWarpSize) {
    scan_segments(params.m_sizes, params.experts, params.total_rows, Shape::kRows, &starts->row,
                  &starts->tile, ceil_div(params.out.cols, Shape::kCols), /*stride=*/2);
  }
  __syncthreads();
  zero_padding_rows<Traits>(params, starts[params.experts].row);

  RowLoader<Traits> loader(params);
  RowScheduler<Shape> scheduler(params, starts);
  TileFeed<Traits, RowLoader<Traits>, RowScheduler<Shape>> feed(loader, scheduler, shared, tiles);
  for (int number = 0;; ++number) {
    const RowTile& tile = tiles[number % kTileSlots];  // not copied: registers are short here
    if (tile.is_end()) break;
    compute_tile<Traits>(params, tile, feed);
  }
  scheduler.leave();
}

}  // namespace moegemm::cuda::sm80
