#pragma once

#include "cuda/device/segments.cuh"
#include "cuda/ptx/warpgroup.cuh"

/// Where each expert's rows begin: m_sizes added up, in shared memory, once per thread block.
namespace moegemm::cuda {

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

/// scan_segments<1> of segments that a placement says. Out of line: sm80's dW kernels are compiled
/// as if it were absent, and spill registers otherwise.
__device__ __noinline__ inline void scan_placed_rows(const SegmentParams& params,
                                                     RowStarts starts) {
  const int lane = threadIdx.x % kWarpSize;
  int before = 0;  // what earlier passes counted
  if (lane == 0) starts.set(0, 0, 0);
  for (int base = 0; base < params.experts; base += kWarpSize) {
    const int expert = base + lane;
    const int rows =
        expert < params.experts ? params.placement.size(expert, params.m_sizes[expert]) : 0;
    const int up_to = add_saturating(
        before, inclusive_scan_saturating(rows, params.row_limit, lane), params.row_limit);
    if (expert < params.experts) starts.set(expert + 1, up_to, 0);
    before = __shfl_sync(kFullMask, up_to, kWarpSize - 1);
  }
}

/// Sets the starts of experts 0 to `experts`, clipped at row_limit, by `Warps` whole warps: any
/// one, or the first of the block together. Segments are counted as if they followed one another,
/// also where `placement` says where they are. A kernel's start can count: the sizes of 128 experts
/// per warp (256 of one alone) are in flight together, and the code is short, which matters as much
/// where it comes from memory too. With several warps, `totals` [Warps] is scratch in shared memory
/// and `barrier` the id of a barrier of `Threads` threads that nobody else uses meanwhile; those
/// which are not of the scan attend it. Others may read the result after a barrier only.
template <int Warps, int Threads = Warps* kWarpSize, typename Starts>
__device__ inline void scan_segments(const SegmentParams& params, const Starts& starts,
                                     SegmentStart* totals = nullptr, int barrier = 0) {
  const IndexArray& m_sizes = params.m_sizes;
  const int experts = params.experts;
  const int row_limit = params.row_limit;
  static_assert(Starts::kTiles == (Warps > 1), "the barrier of the tiles frees `totals`");
  if constexpr (Warps == 1) {
    if (params.placement.given()) return scan_placed_rows(params, starts);
  }
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
      rows[i] = first + i < experts ? clip_size(signed_value(sizes[i], m_sizes), row_limit) : 0;
    }
    if (Warps > 1 && params.placement.given()) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (first + i < experts) {
          rows[i] = params.placement.size(first + i, signed_value(sizes[i], m_sizes));
        }
      }
    }
#pragma unroll
    for (int i = 1; i < kEach; ++i) rows[i] = add_saturating(rows[i - 1], rows[i], row_limit);
    const int warp_rows = inclusive_scan_saturating(rows[kEach - 1], row_limit, lane);
    if constexpr (Warps > 1) {
      if (lane == kWarpSize - 1) totals[warp].row = warp_rows;
      ptx::bar_sync(barrier, Threads);
    }
    const int lanes_rows = __shfl_up_sync(kFullMask, warp_rows, 1);
    int row = add_saturating(before.row, lane > 0 ? lanes_rows : 0, row_limit);
#pragma unroll
    for (int w = 0; w < Warps; ++w) {
      const int total =
          Warps > 1 ? totals[w].row : __shfl_sync(kFullMask, warp_rows, kWarpSize - 1);
      if (w < warp) row = add_saturating(row, total, row_limit);
      before.row = add_saturating(before.row, total, row_limit);
    }
    int tiles[kEach];
    int end = row;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int begin = end;
      end = add_saturating(row, rows[i], row_limit);
      rows[i] = end;
      tiles[i] = starts.tiles_of(end - begin) + (i > 0 ? tiles[i - 1] : 0);
    }
    int tile = before.tile;
    if constexpr (Starts::kTiles) {
      const int warp_tiles = inclusive_scan(tiles[kEach - 1], lane);
      if (lane == kWarpSize - 1) totals[warp].tile = warp_tiles;
      ptx::bar_sync(barrier, Threads);
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

/// For the threads that are not of the scan, with the same arguments.
template <int Warps, int Threads>
__device__ __forceinline__ void attend_scan(const SegmentParams& params, int barrier) {
  constexpr int kExpertsOfPass = Warps * kWarpSize * 4;
#pragma unroll 1
  for (int base = 0; base < params.experts; base += kExpertsOfPass) {
    ptx::bar_sync(barrier, Threads);
    ptx::bar_sync(barrier, Threads);
  }
}

}  // namespace moegemm::cuda
