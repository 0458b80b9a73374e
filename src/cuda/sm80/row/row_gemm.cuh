#pragma once

#include <climits>

#include "cuda/device/unnamed_rows.cuh"
#include "cuda/sm80/row/row_gemm_load.cuh"
#include "cuda/sm80/row/row_targets.cuh"
#include "cuda/sm80/tile/load_warps.cuh"
#include "cuda/sm80/tile/multiply.cuh"
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
///
/// With Shape::kLoadWarps (Hopper), one block on a multiprocessor:
///
/// | warps   | registers | role                                     | waits for       | signals     |
/// |---------|-----------|------------------------------------------|-----------------|-------------|
/// | 0 to 7  | 208       | mma.sync, store                          | full stages     | free stages |
/// | 8 to 11 | 88        | cp.async, where results go; 8: tiles, too | free stages     | full stages |
// clang-format on
namespace moegemm::cuda::sm80 {

/// Adds the bias of the tile's expert to every row.
template <typename Traits>
__device__ __forceinline__ void add_bias(const RowGemmParams& params, const RowTile& tile,
                                         Accumulators<Traits>& acc) {
  using Shape = typename Traits::Shape;
  const int first = tile.feature + warp_col<Shape>() + lane_col<Traits>(0);
  const auto* bias = static_cast<const typename Traits::Element*>(params.bias) +
                     tile.expert * params.bias_stride + first;
  const int left = params.out.cols - first;
#pragma unroll
  for (int j = 0; j < Shape::kColBlocks; ++j) {
    // Where vectors are stored, both columns of a pair exist or none.
    const int col = lane_col<Traits>(j) - lane_col<Traits>(0);
    const bool second = kVectors<Traits> ? col < left : col + 1 < left;
    const float low = col < left ? static_cast<float>(__ldg(bias + col)) : 0.0f;
    const float high = second ? static_cast<float>(__ldg(bias + col + 1)) : 0.0f;
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

/// `found`: the targets of the tile's rows, in kernels with warps that copy.
template <typename Traits, typename Feed>
__device__ __forceinline__ void compute_tile(const RowGemmParams& params, const RowTile& tile,
                                             Feed& feed, const RowTarget* found = nullptr) {
  using Shape = typename Traits::Shape;
  // Small tiles are short: their indices are fetched under the multiplications. Large ones have no
  // registers for that.
  constexpr bool kFound = Shape::kLoadWarps > 0;
  constexpr bool kLocateFirst = !kFound && Shape::kRowBlocks <= 2;
  RowTargets<Traits> targets;
  if constexpr (kLocateFirst) targets.locate(params, tile, row_blocks_for<Shape>(tile.rows));
  Accumulators<Traits> acc;
  clear<Traits>(acc);
  multiply_rows<Traits, Shape::kRowBlocks>(params, row_blocks_for<Shape>(tile.rows), feed, acc);
  const int row_blocks = row_blocks_for<Shape>(tile.rows);  // read again: no register keeps it
  if (params.bias) add_bias<Traits>(params, tile, acc);
  if constexpr (kFound) {
    targets.read(found, row_blocks);
  } else if constexpr (!kLocateFirst) {
    targets.locate(params, tile, row_blocks);
  }
  if (params.multiply) targets.scale(acc);
  store_tile<Traits>(acc, row_blocks, params.out, targets.rows, tile.feature);
}

/// One row of the output, by a whole warp.
template <typename Traits>
__device__ __forceinline__ void zero_row(const RowGemmParams& params, std::int64_t row) {
  const OutputView& out = params.out;
  const int element_bytes = out.is_fp32 ? 4 : Traits::kElementBytes;
  std::byte* line = static_cast<std::byte*>(out.data) + row * out.stride * element_bytes;
  using Unit = std::conditional_t<kVectors<Traits>, uint2, unsigned short>;  // divides any row
  const std::int64_t units = static_cast<std::int64_t>(out.cols) * element_bytes / sizeof(Unit);
  for (std::int64_t i = lane_id(); i < units; i += kWarpThreads) {
    reinterpret_cast<Unit*>(line)[i] = Unit{};
  }
}

/// In expert order, rows past the last segment are zero; the multiplying warps of all blocks share
/// them.
template <typename Traits>
__device__ __forceinline__ void zero_padding_rows(const RowGemmParams& params, int routed_rows) {
  if (params.scatter) return;
  constexpr int kWarps = Traits::Shape::kWarps;
  const int step = gridDim.x * kWarps;
  for (long long row = routed_rows + static_cast<int>(blockIdx.x) * kWarps + warp_id();
       row < params.total_rows; row += step) {
    zero_row<Traits>(params, row);
  }
}

/// What UnnamedRows asks.
template <typename Traits>
struct ScatteredOutput {
  using Layout = RowGemmLayout<typename Traits::Shape>;
  const RowGemmParams& params;
  std::byte* shared;

  __device__ __forceinline__ const IndexArray& indices() const { return params.gather_indices; }
  __device__ __forceinline__ int rows() const { return params.scatter ? params.flat_rows : 0; }
  __device__ __forceinline__ int routed() const {
    return reinterpret_cast<const SegmentStart*>(shared + Layout::kStarts)[params.experts].row;
  }
  __device__ __forceinline__ unsigned* words() const {
    return reinterpret_cast<unsigned*>(shared + Layout::kNamedRows);
  }
  static __device__ __forceinline__ int word_count() { return kNamedWords; }
  __device__ __forceinline__ void zero(int row) const { zero_row<Traits>(params, row); }
};

/// In flat order, rows that no position names are zero. By all warps before their first tile, with
/// many loads in flight: spread over the tiles it took all main loops 1 to 2 %. Out of line, where
/// nothing else is in registers yet: the main loops are then compiled as if it were absent. Small
/// tiles have few indices to read, and wait for this code: it is short there.
template <typename Traits>
__device__ __noinline__ void zero_unnamed_rows(const RowGemmParams& params, std::byte* shared) {
  using Output = ScatteredOutput<Traits>;
  using Shape = typename Traits::Shape;
  constexpr int kLoads = Shape::kRows <= 32 ? 2 : 16;
  const Output output = {params, shared};
  UnnamedRows<0, Shape::kThreads, kNamedRowsBarrier, kLoads, Output>(output).advance(INT_MAX);
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::Shape::kThreads, Traits::Shape::kBlocksPerMultiprocessor)
    row_gemm_kernel(const __grid_constant__ RowGemmParams params) {
  using Shape = typename Traits::Shape;
  using Layout = RowGemmLayout<Shape>;
  static_assert(sizeof(RowTile) <= kTileBytes);
  extern __shared__ __align__(kStageAlignment) std::byte shared[];
  auto* tiles = reinterpret_cast<RowTile*>(shared + Layout::kTiles);
  auto* starts = reinterpret_cast<SegmentStart*>(shared + Layout::kStarts);
  auto* ring = reinterpret_cast<StageRing<Shape>*>(shared + Layout::kRing);
  if (threadIdx.x < kWarpSize) {
    scan_segments(params.m_sizes, params.experts, params.total_rows, Shape::kRows, &starts->row,
                  &starts->tile, ceil_div(params.out.cols, Shape::kCols), /*stride=*/2);
  }
  if constexpr (Shape::kLoadWarps > 0) {
    if (threadIdx.x == Shape::kFirstCopyThread) ring->prepare();
  }
  __syncthreads();
  if (params.scatter) zero_unnamed_rows<Traits>(params, shared);

  if constexpr (Shape::kLoadWarps > 0) {
    auto* targets = reinterpret_cast<RowTarget*>(shared + Layout::kTargets);
    static_assert(sizeof(RowTarget) == 8);
    if (threadIdx.x >= Shape::kFirstCopyThread) {
      ptx::setmaxnreg_dec<kLoadRegisters>();
      RowStreamLoader<Traits> loader(params, targets);
      RowScheduler<Shape> scheduler(params, starts);
      copy_tiles(loader, scheduler, shared, tiles, *ring);
      scheduler.leave();
      return;
    }
    ptx::setmaxnreg_inc<kMultiplyRegisters>();
    zero_padding_rows<Traits>(params, starts[params.experts].row);
    StageReader<Shape> feed(shared, *ring);
    for (int number = 0;; ++number) {
      feed.wait();
      const RowTile& tile = tiles[number % kTileSlots];
      if (tile.is_end()) return;
      compute_tile<Traits>(params, tile, feed, targets + RowStreamLoader<Traits>::slot_of(number));
    }
  } else {
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
}

}  // namespace moegemm::cuda::sm80
