#pragma once

#include <cstdint>

#include "cuda/device/segments.cuh"
#include "cuda/ptx/warpgroup.cuh"

/// Rows of an output that no tile stores: they are zero.
namespace moegemm::cuda {

/// In expert order those past the last segment, shared by `Warps` warps of each block; `warp` is
/// the caller's number among them. Calls zero(row), by a whole warp.
template <int Warps, typename Params, typename Zero>
__device__ __forceinline__ void zero_padding_rows(const Params& params, int routed_rows, int warp,
                                                  const Zero& zero) {
  const int step = gridDim.x * Warps;
  for (long long row = routed_rows + static_cast<int>(blockIdx.x) * Warps + warp;
       row < params.zeroed_rows; row += step) {
    zero(row);
  }
}

/// In flat order those that no valid position names.
///
/// A block looks after a share of the output's rows: it reads every index of the segments, marks
/// the rows of its share that they name, and zeroes the others. Nobody else stores to those, so
/// that blocks need not wait for each other. `Threads` threads of a block from number `First` on,
/// whole warps, do it together; they can spread it over their other work. `Barrier` is the id of a
/// named barrier that nobody else uses. `Loads` 16-byte loads of a thread are in flight.
///
/// Output: indices(); rows(), less than 2^30, 0 if there is nothing to look for; routed(), which is
/// sum(m_sizes): positions from there on name nothing; words() [word_count()], shared memory;
/// zero(row), called by a whole warp. It is asked again each time: registers are short.
template <int First, int Threads, int Barrier, int Loads, typename Output>
class UnnamedRows {
 public:
  __device__ __forceinline__ explicit UnnamedRows(const Output& output) : output_(output) {
    begin(static_cast<int>(blockIdx.x) * share());
  }

  /// So many after each tile that the last quarter of this block's share of `tiles` tiles needs
  /// none.
  __device__ __forceinline__ int steps_per_tile(int tiles) const {
    if (first_ >= output_.rows()) return 0;
    const int steps = ceil_div(output_.routed(), Loads * Threads * per_load()) + 1;  // of one share
    return ceil_div(4 * steps, 3 * max(1, tiles / static_cast<int>(gridDim.x)));
  }

  /// Takes up to `steps` steps: `Loads` loads of each thread, or the zeros of a share. All threads
  /// call it alike.
  __device__ __forceinline__ void advance(int steps) {
#pragma unroll 1
    for (; steps > 0 && first_ < output_.rows(); --steps) {
      if (position_ < output_.routed()) {
        mark_next();
      } else {
        ptx::bar_sync(Barrier, Threads);
        zero_unmarked();
        ptx::bar_sync(Barrier, Threads);  // before the words are cleared
        begin(first_ + static_cast<int>(gridDim.x) * share());
      }
    }
  }

 private:
  static __device__ __forceinline__ int thread() { return ptx::thread_index() - First; }

  /// Rows of a block. Where the segments take nearly all positions there is hardly a row to zero:
  /// few blocks do it, since each reads all indices (Qwen3-Next fwd2 on an H200: 4 % longer with 40
  /// of 132 blocks). Else all blocks share the stores.
  __device__ __forceinline__ int share() const {
    const int rows = output_.rows();
    const int most = output_.word_count() * 32;
    const bool few = rows - output_.routed() <= rows / 16;
    return few ? most : min(most, ceil_div(rows, static_cast<int>(gridDim.x)));
  }
  __device__ __forceinline__ int own_rows() const { return min(share(), output_.rows() - first_); }

  /// The shares of all blocks are less than 2^30 rows, too.
  __device__ __forceinline__ void begin(int first) {
    first_ = first;
    position_ = 0;
    if (first_ >= output_.rows()) return;
    for (int word = thread(); word * 32 < own_rows(); word += Threads) output_.words()[word] = 0;
    ptx::bar_sync(Barrier, Threads);
  }

  __device__ __forceinline__ int per_load() const { return output_.indices().is_64_bit ? 2 : 4; }

  /// The indices from position `at` on that 16 bytes hold. Past the segments: out of range.
  __device__ __forceinline__ uint4 load(int at) const {
    const IndexArray& indices = output_.indices();
    const int routed = output_.routed();
    if (at + per_load() <= routed && reinterpret_cast<std::uintptr_t>(indices.data) % 16 == 0) {
      return static_cast<const uint4*>(indices.data)[at / per_load()];
    }
    uint4 loaded = {kFullMask, kFullMask, kFullMask, kFullMask};
    const int width = indices.is_64_bit ? 2 : 1;  // words of an index
    const unsigned* source =
        static_cast<const unsigned*>(indices.data) + static_cast<long long>(at) * width;
    if (at < routed) loaded.x = source[0];
    if (at + 1 / width < routed) loaded.y = source[1];
    if (at + 2 / width < routed) loaded.z = source[2];
    if (at + 3 / width < routed) loaded.w = source[3];
    return loaded;
  }

  __device__ __forceinline__ void mark(unsigned low, unsigned high, unsigned rows) {
    const unsigned row = low - static_cast<unsigned>(first_);
    if (row < rows && high == 0) atomicOr(output_.words() + row / 32, 1u << row % 32);
  }

  __device__ __forceinline__ void mark_next() {
    uint4 loaded[Loads];
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      loaded[i] = load(position_ + (i * Threads + thread()) * per_load());
    }
    const auto rows = static_cast<unsigned>(own_rows());
#pragma unroll
    for (const uint4& words : loaded) {
      if (output_.indices().is_64_bit) {
        mark(words.x, words.y, rows);
        mark(words.z, words.w, rows);
      } else {
        mark(words.x, 0, rows);
        mark(words.y, 0, rows);
        mark(words.z, 0, rows);
        mark(words.w, 0, rows);
      }
    }
    position_ += Loads * Threads * per_load();
  }

  __device__ __forceinline__ void zero_unmarked() {
#pragma unroll 1
    for (int word = thread() / kWarpSize; word * 32 < own_rows(); word += Threads / kWarpSize) {
      const int left = own_rows() - word * 32;
      unsigned unnamed = ~output_.words()[word] & (left < 32 ? (1u << left) - 1 : kFullMask);
#pragma unroll 1
      for (; unnamed != 0; unnamed &= unnamed - 1) {
        output_.zero(first_ + word * 32 + __ffs(unnamed) - 1);
      }
    }
  }

  const Output& output_;
  int first_;     ///< row of the block's share
  int position_;  ///< whose index is read next
};

}  // namespace moegemm::cuda
