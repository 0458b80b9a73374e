#pragma once

#include "cuda/device/segments.cuh"
#include "cuda/ptx/warpgroup.cuh"

/// Where each expert's rows begin: m_sizes added up, in shared memory, once per thread block.
namespace moegemm::cuda {

/// What was fetched from `array`, sign and all.
__device__ __forceinline__ long long signed_value(const IndexArray::Fetched& fetched,
                                                  const IndexArray& array) {
  const auto low = static_cast<long long>(static_cast<int>(fetched.low));
  return array.is_64_bit ? static_cast<long long>(fetched.high) << 32 | fetched.low : low;
}

/// Starts of scan_segments: the rows before each expert, [E + 1].
struct RowStarts {
  int* rows;

  static constexpr bool kTiles = false;
  static __device__ __forceinline__ int tiles_of(int) { return 0; }
  __device__ __forceinline__ void set(int expert, int row, int) const { rows[expert] = row; }
};

/// The output tiles before each expert as well: `column_tiles` for every `max_rows` rows of one.
struct TileStarts {
  SegmentStart* starts;
  int max_rows;
  int column_tiles;

  static constexpr bool kTiles = true;
  __device__ __forceinline__ int tiles_of(int rows) const {
    return row_tiles(rows, max_rows) * column_tiles;
  }
  __device__ __forceinline__ void set(int expert, int row, int tile) const {
    starts[expert] = {row, tile};
  }
};

/// Sets the starts of experts 0 to `experts`, clipped at total_rows, by `Warps` whole warps: any
/// one, or the first of the block together. A kernel's start can count: the sizes of 128 experts
/// per warp (256 of one alone) are in flight together, and the code is short, which matters as much
/// where it comes from memory too. With several warps, `totals` [Warps] is scratch in shared memory
/// and `barrier` the id of a named barrier that nobody else uses meanwhile. Others may read the
/// result after a barrier only.
template <int Warps, typename Starts>
__device__ inline void scan_segments(const IndexArray& m_sizes, int experts, int total_rows,
                                     const Starts& starts, SegmentStart* totals = nullptr,
                                     int barrier = 0) {
  static_assert(Starts::kTiles == (Warps > 1), "the barrier of the tiles frees `totals`");
  constexpr int kEach = Warps > 1 ? 4 : 8;  // consecutive experts of a thread
  const int lane = threadIdx.x % kWarpSize;
  const int warp = Warps > 1 ? threadIdx.x / kWarpSize : 0;
  const int thread = Warps > 1 ? threadIdx.x : lane;
  SegmentStart before = {0, 0};  // what earlier passes counted
  if (thread == 0) starts.set(0, 0, 0);
    // Of one warp alone twice the code: with less, ptxas orders sm80's dW main loops so that they
    // take 4 % longer.
#pragma unroll(Warps > 1 ? 1 : 2)
  for (int base = 0; base < experts; base += Warps * kWarpSize * kEach) {
    const int first = base + thread * kEach;
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
    if constexpr (Warps > 1) {
      if (lane == kWarpSize - 1) totals[warp].row = warp_rows;
      ptx::bar_sync(barrier, Warps * kWarpSize);
    }
    const int lanes_rows = __shfl_up_sync(kFullMask, warp_rows, 1);
    int row = add_saturating(before.row, lane > 0 ? lanes_rows : 0, total_rows);
#pragma unroll
    for (int w = 0; w < Warps; ++w) {
      const int total =
          Warps > 1 ? totals[w].row : __shfl_sync(kFullMask, warp_rows, kWarpSize - 1);
      if (w < warp) row = add_saturating(row, total, total_rows);
      before.row = add_saturating(before.row, total, total_rows);
    }

    int tiles[kEach];
    int end = row;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int begin = end;
      end = add_saturating(row, rows[i], total_rows);
      rows[i] = end;
      tiles[i] = starts.tiles_of(end - begin) + (i > 0 ? tiles[i - 1] : 0);
    }
    int tile = before.tile;
    if constexpr (Starts::kTiles) {
      const int warp_tiles = inclusive_scan(tiles[kEach - 1], lane);
      if (lane == kWarpSize - 1) totals[warp].tile = warp_tiles;
      ptx::bar_sync(barrier, Warps * kWarpSize);
      const int lanes_tiles = __shfl_up_sync(kFullMask, warp_tiles, 1);
      tile += lane > 0 ? lanes_tiles : 0;
#pragma unroll
      for (int w = 0; w < Warps; ++w) {
        if (w < warp) tile += totals[w].tile;
        before.tile += totals[w].tile;
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (first + i < experts) starts.set(first + i + 1, rows[i], tile + tiles[i]);
    }
  }
}

}  // namespace moegemm::cuda
