#pragma once

#include "cuda/device/segments.cuh"
#include "cuda/passes/elements.cuh"

/// Whose row a row is, for kernels that read something per expert.
namespace moegemm::cuda {

/// Shared memory that share_row_prefix has besides row_prefix: an int for each warp.
constexpr int kRowPrefixStaticBytes = 32 * sizeof(int);

/// Sizes that a thread has asked for. Nothing is done to them until they are shared, so that a
/// thread does not wait for them before that.
struct FetchedSizes {
  static constexpr int kEach = 4;
  IndexArray::Fetched sizes[kEach];
};

/// The first sizes, for share_row_prefix; `first` is past them in its later rounds.
__device__ __forceinline__ FetchedSizes fetch_sizes(const IndexArray& m_sizes, int experts,
                                                    int first = 0) {
  FetchedSizes fetched;
  const int mine = first + static_cast<int>(threadIdx.x) * FetchedSizes::kEach;
#pragma unroll
  for (int i = 0; i < FetchedSizes::kEach; ++i) {
    if (mine + i < experts) fetched.sizes[i] = m_sizes.fetch(mine + i);
  }
  return fetched;
}

/// Fills row_prefix[0 .. experts] in shared memory: rows before each expert, as if segments
/// followed one another, which `Placed` ones need not. Called by the whole block, of whole warps,
/// and by all of it at work: blocks are many and short, and a single warp would take microseconds.
/// Not scan_segments: its sizes are asked for where they are added, these before the block's rows,
/// and signed_value in place of the lines below makes every kernel here longer.
template <bool Placed = false>
__device__ inline void share_row_prefix(const IndexArray& m_sizes, FetchedSizes fetched,
                                        int experts, int rows, int* row_prefix,
                                        const Placement& placement = {}) {
  constexpr int kEach = FetchedSizes::kEach;
  __shared__ int warp_sums[kRowPrefixStaticBytes / sizeof(int)];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  int before = 0;
  if (threadIdx.x == 0) row_prefix[0] = 0;
  for (int base = 0;;) {
    const int mine = base + static_cast<int>(threadIdx.x) * kEach;
    int ends[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const IndexArray::Fetched& size = fetched.sizes[i];
      const long long value = m_sizes.is_64_bit ? static_cast<long long>(size.high) << 32 | size.low
                                                : static_cast<int>(size.low);
      ends[i] = mine + i < experts ? clip_size(value, rows) : 0;
      if (Placed && placement.given() && mine + i < experts) {
        ends[i] = placement.size(mine + i, value);
      }
    }
#pragma unroll
    for (int i = 1; i < kEach; ++i) {
      ends[i] = add_saturating(ends[i], ends[i - 1], rows);
    }
    const int inclusive = inclusive_scan_saturating(ends[kEach - 1], rows, lane);
    if (lane == kWarpSize - 1) warp_sums[warp] = inclusive;
    const int lanes_before = __shfl_up_sync(kFullMask, inclusive, 1);
    __syncthreads();
    int start = add_saturating(before, lane == 0 ? 0 : lanes_before, rows);
    for (int w = 0; w < warps; ++w) {
      if (w < warp) start = add_saturating(start, warp_sums[w], rows);
      before = add_saturating(before, warp_sums[w], rows);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (mine + i < experts) row_prefix[mine + i + 1] = add_saturating(start, ends[i], rows);
    }
    base += kEach * static_cast<int>(blockDim.x);
    __syncthreads();  // row_prefix may be read, and warp_sums written again
    if (base >= experts) return;
    fetched = fetch_sizes(m_sizes, experts, base);
  }
}

/// The expert of a row below row_prefix[experts].
__device__ __forceinline__ int expert_of(const int* row_prefix, int experts, int row) {
  int low = 0, high = experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (row_prefix[middle] <= row ? low : high) = middle;
  }
  return low;
}

/// The same of segments anywhere, all at once; returns how many rows they have together.
__device__ __forceinline__ int share_positions(const SegmentParams& segments, int* row_prefix) {
  share_row_prefix<true>(segments.m_sizes, fetch_sizes(segments.m_sizes, segments.experts),
                         segments.experts, segments.row_limit, row_prefix, segments.placement);
  return row_prefix[segments.experts];
}

/// The same, and in `shifts` how far each segment is from where it would be if they followed one
/// another: read together with the sizes, since whoever needs a row waits for both.
__device__ __forceinline__ int share_positions(const SegmentParams& segments, int* row_prefix,
                                               int* shifts) {
  const Placement& placement = segments.placement;
  const int first = static_cast<int>(threadIdx.x);
  const int begin = placement.given() && first < segments.experts ? placement.begin(first) : 0;
  const int routed = share_positions(segments, row_prefix);
#pragma unroll 1
  for (int e = first; e < segments.experts; e += static_cast<int>(blockDim.x)) {
    shifts[e] = placement.given() ? (e == first ? begin : placement.begin(e)) - row_prefix[e] : 0;
  }
  __syncthreads();
  return routed;
}

/// Finds rows by their positions, which count the rows of all segments, expert after expert.
/// Positions may only grow.
class SegmentCursor {
 public:
  __device__ __forceinline__ SegmentCursor(const SegmentParams& segments, const int* row_prefix)
      : segments_(segments), row_prefix_(row_prefix) {}

  /// The row at a position inside the segments.
  __device__ __forceinline__ int row_at(int position) {
    if (position >= end_) {
      expert_ = expert_of(row_prefix_, segments_.experts, position);
      end_ = row_prefix_[expert_ + 1];
      shift_ = segments_.placement.given()
                   ? segments_.placement.begin(expert_) - row_prefix_[expert_]
                   : 0;
    }
    return position + shift_;
  }
  /// Of the row that was found last.
  __device__ __forceinline__ int expert() const { return expert_; }

 private:
  const SegmentParams& segments_;
  const int* row_prefix_;
  int expert_ = 0;
  int end_ = 0;
  int shift_ = 0;
};

/// An element of a row of the first product, with its expert's bias if there is one.
__device__ inline float load_biased(const Floats& pre, const Floats& bias, int row, int expert,
                                    int column) {
  const float value = pre.load(row * pre.stride + column);
  return bias.data ? value + bias.load(expert * bias.stride + column) : value;
}

/// Dynamic shared memory of a block that knows its rows' experts.
inline int row_prefix_bytes(std::int64_t experts) {
  return static_cast<int>((experts + 1) * sizeof(int));
}

}  // namespace moegemm::cuda
