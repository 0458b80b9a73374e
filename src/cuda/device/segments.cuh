#pragma once

#include <cstdint>

#include "cuda/device/tile_split.h"
#include "cuda/device/warp.h"

/// Where each expert's rows lie: built from m_sizes in shared memory, once per thread block.
namespace moegemm::cuda {

/// Where an expert begins; the entry after the last one is the end of everything.
struct SegmentStart {
  int row;   ///< rows before it
  int tile;  ///< output tiles before it
};

/// An int32 or int64 array that somebody else checked for length; the width is a run-time flag, so
/// that it does not double the number of compiled kernels.
struct IndexArray {
  const void* data;
  bool is_64_bit;

  /// An element as it was loaded: nothing is done to it until `below`, so a warp that has fetched
  /// one does not wait for it before that.
  struct Fetched {
    unsigned low = 0xffffffffu;
    unsigned high = 0;

    /// The value if it is in [0, limit), else -1.
    __device__ __forceinline__ int below(int limit) const {
      // Negative values have the top bit of `low` (int32) or a non-zero `high` (int64).
      return high == 0 && low < static_cast<unsigned>(limit) ? static_cast<int>(low) : -1;
    }
  };
  __device__ __forceinline__ Fetched fetch(long long i) const {
    const auto* words = static_cast<const unsigned*>(data) + (is_64_bit ? 2 * i : i);
    Fetched fetched;
    fetched.low = __ldg(words);
    if (is_64_bit) fetched.high = __ldg(words + 1);
    return fetched;
  }

  __device__ __forceinline__ long long operator[](long long i) const {
    return is_64_bit ? __ldg(static_cast<const long long*>(data) + i)
                     : __ldg(static_cast<const int*>(data) + i);
  }
};

__device__ __forceinline__ int inclusive_scan_saturating(int value, int limit, int lane) {
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = __shfl_up_sync(kFullMask, value, step);
    if (lane >= step) value = add_saturating(value, other, limit);
  }
  return value;
}

__device__ __forceinline__ int inclusive_scan(int value, int lane) {
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int other = __shfl_up_sync(kFullMask, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

/// Fills row_prefix[0..experts] (clipped at total_rows) and, if not null, tile_prefix[0..experts]:
/// the tiles before each expert, `column_tiles` for every row tile. Entries are `stride` apart.
/// Called by one whole warp.
__device__ inline void scan_segments(const IndexArray& m_sizes, int experts, int total_rows,
                                     int max_rows, int* row_prefix, int* tile_prefix,
                                     int column_tiles = 1, int stride = 1) {
  constexpr int kBatch = 8;  // loads in flight per lane: their latency is paid once per 256 experts
  const int lane = threadIdx.x % kWarpSize;
  int rows_before = 0;
  int tiles_before = 0;
  if (lane == 0) {
    row_prefix[0] = 0;
    if (tile_prefix) tile_prefix[0] = 0;
  }
  for (int base = 0; base < experts; base += kBatch * kWarpSize) {
    int sizes[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int expert = base + i * kWarpSize + lane;
      sizes[i] = expert < experts ? clip_size(m_sizes[expert], total_rows) : 0;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int expert = base + i * kWarpSize + lane;
      const int end = add_saturating(inclusive_scan_saturating(sizes[i], total_rows, lane),
                                     rows_before, total_rows);
      int begin = __shfl_up_sync(kFullMask, end, 1);
      if (lane == 0) begin = rows_before;
      rows_before = __shfl_sync(kFullMask, end, kWarpSize - 1);
      if (expert < experts) row_prefix[(expert + 1) * stride] = end;
      if (tile_prefix) {
        const int tiles =
            inclusive_scan(row_tiles(end - begin, max_rows) * column_tiles, lane) + tiles_before;
        tiles_before = __shfl_sync(kFullMask, tiles, kWarpSize - 1);
        if (expert < experts) tile_prefix[(expert + 1) * stride] = tiles;
      }
    }
  }
}

/// The flat row that expert-ordered position `row` names, or -1 if it is out of range.
__device__ __forceinline__ int flat_row(const IndexArray& gather_indices, int row, int total_rows) {
  const long long index = gather_indices[row];
  return index >= 0 && index < total_rows ? static_cast<int>(index) : -1;
}

/// The router weight of a flat row, in fp32 or in the type of the inputs.
template <typename T>
__device__ __forceinline__ float router_weight(const void* weights, bool are_fp32, int flat) {
  if (are_fp32) return __ldg(static_cast<const float*>(weights) + flat);
  return static_cast<float>(__ldg(static_cast<const T*>(weights) + flat));
}

}  // namespace moegemm::cuda
