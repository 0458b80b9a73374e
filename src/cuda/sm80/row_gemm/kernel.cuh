#pragma once

#include "cuda/device/element.cuh"
#include "cuda/device/segment_scan.cuh"
#include "cuda/sm80/row_gemm/load.cuh"
#include "cuda/sm80/row_gemm/mma.cuh"
#include "cuda/sm80/row_gemm/store.cuh"
#include "cuda/sm80/row_gemm/traits.h"

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

/// `found`: the targets of the tile's rows, in kernels with warps that only copy.
template <typename Traits, typename Feed>
__device__ __forceinline__ void compute_tile(const RowGemmParams& params, const RowTile& tile,
                                             Feed& feed, const RowTarget* found) {
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

/// What run_tiles asks.
template <typename Traits>
struct RowPipeline {
  using Shape = typename Traits::Shape;
  using Tile = RowTile;
  const RowGemmParams& params;
  const SegmentStart* starts;
  RowTarget* targets;

  __device__ __forceinline__ auto loader() const {
    if constexpr (Shape::kLoadWarps > 0) {
      return RowStreamLoader<Traits>(params, targets);
    } else {
      return RowLoader<Traits>(params);
    }
  }
  __device__ __forceinline__ RowScheduler<Shape> scheduler() const { return {params, starts}; }
  __device__ __forceinline__ void start() const {
    if (params.scatter) return;
    zero_padding_rows<Shape::kWarps>(params, starts[params.experts].row, warp_id(),
                                     [&](long long row) { zero_row<Traits>(params, row); });
  }
  template <typename Feed>
  __device__ __forceinline__ void compute(const RowTile& tile, int number, Feed& feed) const {
    compute_tile<Traits>(params, tile, feed, targets + RowStreamLoader<Traits>::slot_of(number));
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::Shape::kThreads, Traits::Shape::kBlocksPerMultiprocessor)
    row_gemm_kernel(const __grid_constant__ RowGemmParams params) {
  using Shape = typename Traits::Shape;
  using Layout = RowGemmLayout<Shape>;
  extern __shared__ __align__(kStageAlignment) std::byte shared[];
  auto* tiles = reinterpret_cast<RowTile*>(shared + Layout::kTiles);
  auto* starts = reinterpret_cast<SegmentStart*>(shared + Layout::kStarts);
  auto* ring = reinterpret_cast<StageRing<Shape>*>(shared + Layout::kRing);
  if (threadIdx.x < kScanWarps * kWarpSize) {
    scan_segments<kScanWarps, Shape::kThreads>(
        params, TileStarts{starts, Shape::kRows, ceil_div(params.out.cols, Shape::kCols)},
        reinterpret_cast<SegmentStart*>(shared + Layout::kScan), kNamedRowsBarrier);
  } else {
    // racecheck would report reads of the starts by these: it does not follow a block's barrier
    // after one of some warps only.
    attend_scan<kScanWarps, Shape::kThreads>(params, kNamedRowsBarrier);
  }
  prepare_ring(*ring);
  __syncthreads();
  if (params.scatter) zero_unnamed_rows<Traits>(params, shared);
  auto* targets = reinterpret_cast<RowTarget*>(shared + Layout::kTargets);
  run_tiles<Traits>(RowPipeline<Traits>{params, starts, targets}, shared, tiles, *ring);
}

template <RowGemm Kernel, DType D>
KernelFunctions row_gemm_functions() {
  // W_e is [N, K]: its rows are K-contiguous, which is the contraction in forward and the output
  // columns in dX.
  constexpr Major kWeights = Kernel.op == Op::kForward ? Major::kDepth : Major::kOuter;
  using Traits = GemmTraits<ShapeOf<Kernel>, ElementType<D>, Kernel.math, Major::kDepth, kWeights,
                            Kernel.loads, Kernel.quantised, Kernel.any_bank>;
  return {.plain = reinterpret_cast<const void*>(&row_gemm_kernel<Traits>)};
}

}  // namespace moegemm::cuda::sm80
