#pragma once

#include <cstdint>

#include "cuda/device/segments.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace moegemm::cuda {

/// The rows of an output in flat order that no valid position names; they have to become zero.
///
/// A block looks after a share of the output's rows: it reads every index of the segments, marks
/// the rows of its share that they name, and zeroes the others. Nobody else stores to those, so
/// that blocks need not wait for each other. `Threads` threads of a block from number `First` on,
/// whole warps, do it together; they can spread it over their other work. `Barrier` is the id of a
/// named barrier that nobody else uses. `Loads` loads of a thread are in flight.
template <int First, int Threads, int Barrier, int Loads, typename Words>
class UnnamedRows {
 public:
  /// `routed` is sum(m_sizes): positions from there on name nothing. There are less than 2^30 rows.
  /// `words()` is shared memory, [word_count].
  __device__ __forceinline__ UnnamedRows(const IndexArray& indices, int routed,
                                         const int& total_rows, const Words& words, int word_count)
      : indices_(indices), total_rows_(total_rows), routed_(routed), words_(words) {
    // Where the segments take nearly all positions there is hardly a row to zero: few blocks do it,
    // since each reads all indices (Qwen3-Next fwd2 on an H200: 4 % longer with 40 of 132 blocks).
    // Else all blocks share the stores.
    const bool few = total_rows - routed <= total_rows / 16;
    share_ = word_count * 32;
    if (!few) share_ = min(share_, ceil_div(total_rows, static_cast<int>(gridDim.x)));
    begin(static_cast<int>(blockIdx.x) * share_);
  }

  /// How many steps a block has that takes one share.
  __device__ __forceinline__ int steps() const {
    return first_ < total_rows_ ? ceil_div(routed_, Loads * Threads * per_load()) + 1 : 0;
  }

  /// Takes up to `steps` steps: `Loads` loads of each thread, or the zeros of a share, for which
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

  __device__ __forceinline__ int per_load() const { return indices_.is_64_bit ? 2 : 4; }

  /// The indices from position `at` on that 16 bytes hold. Past the segments: out of range.
  __device__ __forceinline__ uint4 load(int at) const {
    uint4 loaded = {kFullMask, kFullMask, kFullMask, kFullMask};
    if (at + per_load() <= routed_ && reinterpret_cast<std::uintptr_t>(indices_.data) % 16 == 0) {
      return __ldg(static_cast<const uint4*>(indices_.data) + at / per_load());
    }
    const int width = indices_.is_64_bit ? 2 : 1;  // words of an index
    const unsigned* source =
        static_cast<const unsigned*>(indices_.data) + static_cast<long long>(at) * width;
    if (at < routed_) loaded.x = __ldg(source);
    if (at + 1 / width < routed_) loaded.y = __ldg(source + 1);
    if (at + 2 / width < routed_) loaded.z = __ldg(source + 2);
    if (at + 3 / width < routed_) loaded.w = __ldg(source + 3);
    return loaded;
  }

  __device__ __forceinline__ void mark(unsigned low, unsigned high) {
    const unsigned row = low - static_cast<unsigned>(first_);
    if (row < static_cast<unsigned>(rows()) && high == 0) {
      atomicOr(words_() + row / 32, 1u << row % 32);
    }
  }

  __device__ __forceinline__ void mark_next() {
    uint4 loaded[Loads];
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      loaded[i] = load(position_ + (i * Threads + thread()) * per_load());
    }
#pragma unroll
    for (const uint4& words : loaded) {
      if (indices_.is_64_bit) {
        mark(words.x, words.y);
        mark(words.z, words.w);
      } else {
        mark(words.x, 0);
        mark(words.y, 0);
        mark(words.z, 0);
        mark(words.w, 0);
      }
    }
    position_ += Loads * Threads * per_load();
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

template <int First, int Threads, int Barrier, int Loads, typename Words>
__device__ __forceinline__ auto unnamed_rows(const IndexArray& indices, int routed,
                                             const int& total_rows, const Words& words,
                                             int word_count) {
  return UnnamedRows<First, Threads, Barrier, Loads, Words>(indices, routed, total_rows, words,
                                                            word_count);
}

}  // namespace moegemm::cuda
