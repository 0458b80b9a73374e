#pragma once

#include "cuda/device/segments.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace moegemm::cuda {

/// What was fetched from `array`, sign and all.
__device__ __forceinline__ long long signed_value(const IndexArray::Fetched& fetched,
                                                  const IndexArray& array) {
  const auto low = static_cast<long long>(static_cast<int>(fetched.low));
  return array.is_64_bit ? static_cast<long long>(fetched.high) << 32 | fetched.low : low;
}

/// What scan_segments does, by `Warps` warps together: starts[0..experts], with the tiles before
/// each expert, `column_tiles` for every row tile. For kernels whose start counts: the sizes of
/// 128 experts per warp are in flight together, and the code is short, which matters as much
/// where it comes from memory too. The warps are the first of the block; `totals` [Warps] is
/// scratch in shared memory, `barrier` the id of a named barrier that nobody else uses meanwhile.
/// Others may read the result behind a barrier only.
template <int Warps>
__device__ inline void scan_segments_together(const IndexArray& m_sizes, int experts,
                                              int total_rows, int max_rows, int column_tiles,
                                              SegmentStart* starts, SegmentStart* totals,
                                              int barrier) {
  constexpr int kEach = 4;  // consecutive experts of a thread
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  SegmentStart before = {0, 0};  // what earlier passes counted
  if (threadIdx.x == 0) starts[0] = before;
#pragma unroll 1
  for (int base = 0; base < experts; base += Warps * kWarpSize * kEach) {
    const int first = base + static_cast<int>(threadIdx.x) * kEach;
    IndexArray::Fetched sizes[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) sizes[i] = m_sizes.fetch(min(first + i, experts - 1));
    int rows[kEach];  // up to and including each expert, from the thread's first on
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      rows[i] = first + i < experts ? clip_size(signed_value(sizes[i], m_sizes), total_rows) : 0;
    }
#pragma unroll
    for (int i = 1; i < kEach; ++i) rows[i] = add_saturating(rows[i - 1], rows[i], total_rows);
    const int warp_rows = inclusive_scan_saturating(rows[kEach - 1], total_rows, lane);
    if (lane == kWarpSize - 1) totals[warp].row = warp_rows;
    ptx::bar_sync(barrier, Warps * kWarpSize);
    const int lanes_rows = __shfl_up_sync(kFullMask, warp_rows, 1);
    int row = add_saturating(before.row, lane > 0 ? lanes_rows : 0, total_rows);
#pragma unroll
    for (int w = 0; w < Warps; ++w) {
      if (w < warp) row = add_saturating(row, totals[w].row, total_rows);
      before.row = add_saturating(before.row, totals[w].row, total_rows);
    }

    int tiles[kEach];
    int end = row;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int begin = end;
      end = add_saturating(row, rows[i], total_rows);
      rows[i] = end;
      tiles[i] = row_tiles(end - begin, max_rows) * column_tiles + (i > 0 ? tiles[i - 1] : 0);
    }
    const int warp_tiles = inclusive_scan(tiles[kEach - 1], lane);
    if (lane == kWarpSize - 1) totals[warp].tile = warp_tiles;
    ptx::bar_sync(barrier, Warps * kWarpSize);
    const int lanes_tiles = __shfl_up_sync(kFullMask, warp_tiles, 1);
    int tile = before.tile + (lane > 0 ? lanes_tiles : 0);
#pragma unroll
    for (int w = 0; w < Warps; ++w) {
      if (w < warp) tile += totals[w].tile;
      before.tile += totals[w].tile;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (first + i < experts) starts[first + i + 1] = {rows[i], tile + tiles[i]};
    }
  }
}

}  // namespace moegemm::cuda
