#pragma once

#include "cuda/device/segments.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace moegemm::cuda {

/// The rows of an output in flat order that no valid position names; they have to become zero.
///
/// A block looks after a share of the output's rows: it reads every index of the segments, marks
/// the rows of its share that they name, and zeroes the others. Nobody else stores to those, so
/// that blocks need not wait for each other. `Threads` threads of a block from number `First` on,
/// whole warps, do it together; they can spread it over their other work. `Barrier` is the id of a
/// named barrier that nobody else uses.
template <int First, int Threads, int Barrier, typename Words>
class UnnamedRows {
 public:
  /// `routed` is sum(m_sizes): positions from there on name nothing. There are less than 2^30 rows.
  /// `words()` is shared memory, [word_count].
  __device__ __forceinline__ UnnamedRows(const IndexArray& indices, int routed,
                                         const int& total_rows, const Words& words, int word_count)
      : indices_(indices), total_rows_(total_rows), routed_(routed), words_(words) {
    // Where the segments take nearly all positions there is hardly a row to zero: a few blocks do
    // it, which reads fewer indices. Else all blocks share the stores.
    const int least = total_rows - routed <= total_rows / 16 ? 2048 : 1;
    share_ = min(word_count * 32, max(least, ceil_div(total_rows, static_cast<int>(gridDim.x))));
    begin(static_cast<int>(blockIdx.x) * share_);
  }

  /// Takes up to `steps` steps: eight indices of each thread, or the zeros of a share, for which
  /// `zero_row(row)` is called by a whole warp. All threads call it alike.
  template <typename ZeroRow>
  __device__ __forceinline__ void advance(int steps, const ZeroRow& zero_row) {
#pragma unroll 1
    for (; steps > 0 && first_ < total_rows_; --steps) {
      if (position_ < routed_) {
        mark_next();
      } else {
        ptx::bar_sync(Barrier, Threads);
        zero_unmarked(zero_row);
        ptx::bar_sync(Barrier, Threads);  // before the words are cleared
        begin(first_ + static_cast<int>(gridDim.x) * share_);
      }
    }
  }

 private:
  /// The shares of all blocks are less than 2^30 rows, too.
  __device__ __forceinline__ void begin(int first) {
    first_ = first;
    position_ = 0;
    if (first_ >= total_rows_) return;
    for (int word = thread(); word * 32 < rows(); word += Threads) words_()[word] = 0;
    ptx::bar_sync(Barrier, Threads);
  }

  static __device__ __forceinline__ int thread() { return ptx::thread_index() - First; }
  __device__ __forceinline__ int rows() const { return min(share_, total_rows_ - first_); }

  __device__ __forceinline__ void mark_next() {
    constexpr int kBatch = 8;  // loads in flight
    const int first = position_ + thread();
    IndexArray::Fetched fetched[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * Threads < routed_) fetched[i] = indices_.fetch(first + i * Threads);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = fetched[i].below(total_rows_) - first_;
      if (row >= 0 && row < share_) atomicOr(words_() + row / 32, 1u << row % 32);
    }
    position_ += kBatch * Threads;
  }

  template <typename ZeroRow>
  __device__ __forceinline__ void zero_unmarked(const ZeroRow& zero_row) {
#pragma unroll 1
    for (int word = thread() / kWarpSize; word * 32 < rows(); word += Threads / kWarpSize) {
      const int left = rows() - word * 32;
      unsigned unnamed = ~words_()[word] & (left < 32 ? (1u << left) - 1 : kFullMask);
#pragma unroll 1
      for (; unnamed != 0; unnamed &= unnamed - 1) {
        zero_row(first_ + word * 32 + __ffs(unnamed) - 1);
      }
    }
  }

  const IndexArray& indices_;  // references, to the kernel's parameters: registers are short
  const int& total_rows_;
  int routed_;
  const Words& words_;
  int share_;     ///< rows of a block
  int first_;     ///< of the block's share
  int position_;  ///< whose index is read next
};

template <int First, int Threads, int Barrier, typename Words>
__device__ __forceinline__ auto unnamed_rows(const IndexArray& indices, int routed,
                                             const int& total_rows, const Words& words,
                                             int word_count) {
  return UnnamedRows<First, Threads, Barrier, Words>(indices, routed, total_rows, words,
                                                     word_count);
}

}  // namespace moegemm::cuda
