#pragma once

#include <cstdint>

#include "cuda/device/schedule/tile_split.h"
#include "cuda/device/warp.h"

/// What sizes and indices in device memory say about rows.
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
    fetched.low = words[0];
    if (is_64_bit) fetched.high = words[1];
    return fetched;
  }

  __device__ __forceinline__ long long operator[](long long i) const {
    return is_64_bit ? static_cast<const long long*>(data)[i] : static_cast<const int*>(data)[i];
  }
};

/// What was fetched from `array`, sign and all.
__device__ __forceinline__ long long signed_value(const IndexArray::Fetched& fetched,
                                                  const IndexArray& array) {
  const auto low = static_cast<long long>(static_cast<int>(fetched.low));
  return array.is_64_bit ? static_cast<long long>(fetched.high) << 32 | fetched.low : low;
}

/// Where segments begin that do not follow one another.
struct Placement {
  IndexArray starts;  ///< data is null: they do. With `ends`: m_sizes once more
  bool ends;          ///< segment e begins where e - 1 ends
  int rows;           ///< of the tensor: segments are clipped at both ends of it

  __device__ __forceinline__ bool given() const { return starts.data != nullptr; }
  __device__ __forceinline__ int clip(long long row) const { return clip_size(row, rows); }

  __device__ __forceinline__ int begin(int expert) const {
    if (!ends) return clip(starts[expert]);
    return expert == 0 ? 0 : clip(starts[expert - 1]);
  }
  /// Of a segment that has this entry in m_sizes.
  __device__ __forceinline__ int size(int expert, long long entry) const {
    if (ends) return max(clip(entry) - begin(expert), 0);
    if (entry <= 0) return 0;
    const long long start = starts[expert];
    const long long end = start + min(entry, 1ll << 62);  // a sum that does not fit turns negative
    return start > 0 && end < 0 ? rows - clip(start) : clip(end) - clip(start);
  }
};

/// What every product is told about segments.
struct SegmentParams {
  IndexArray m_sizes;
  Placement placement;
  int experts;
  int row_limit;    ///< of all segments together; what comes after it is cut off
  int zeroed_rows;  ///< of the output, from the first on, that become zero where nobody stores
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

/// The flat row that expert-ordered position `row` names, or -1 if it is out of range.
__device__ __forceinline__ int flat_row(const IndexArray& gather_indices, int row, int total_rows) {
  const long long index = gather_indices[row];
  return index >= 0 && index < total_rows ? static_cast<int>(index) : -1;
}

/// A tile whose row was counted as if segments followed one another, where it really is.
__device__ __forceinline__ Tile placed_tile(Tile tile, const Placement& placement,
                                            const SegmentStart* starts) {
  if (placement.given() && tile.rows > 0) {
    tile.row += placement.begin(tile.expert) - starts[tile.expert].row;
  }
  return tile;
}

/// The router weight of a flat row, in fp32 or in the type of the inputs.
template <typename T>
__device__ __forceinline__ float router_weight(const void* weights, bool are_fp32, int flat) {
  if (are_fp32) return static_cast<const float*>(weights)[flat];
  return static_cast<float>(static_cast<const T*>(weights)[flat]);
}

}  // namespace moegemm::cuda
