#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/passes/factors/copy_params.h"

/// A tile of 2^kTurnLog elements, turned in shared memory. A thread loads 16 bytes of one line, of
/// two lines where the result has 16 bits, and leaves words that hold neighbouring lines of a
/// column. A column's words lie together, in chunks of 16 bytes that are stored as they are.
///
///   lanes of a warp    8 loads side by side (128 bytes of a line) by 4 words, where a tile is that
///                      wide; else fewer loads by more words
///   chunk's place      its number with the low three bits changed by the load that fills it, so
///                      that the words of a warp fall into different banks
namespace moegemm::cuda {

constexpr int kTurnBytes = (1 << kTurnLog) * 4;
constexpr int kMostFlags = (1 << kTurnLog) / 8;  ///< a side of a tile is at most this long

template <typename From, typename To>
struct TurnTile {
  static constexpr int kLogColumns = sizeof(From) == 4 ? 2 : 3;  ///< of a load
  static constexpr int kColumns = 1 << kLogColumns;
  static constexpr int kLogLines = sizeof(To) == 4 ? 0 : 1;  ///< of a word
  static constexpr int kLines = 1 << kLogLines;
  static constexpr int kChunkLines = 16 / static_cast<int>(sizeof(To));
  static constexpr int kLoads = (1 << kTurnLog) / (kColumns * kLines) / kCopyThreads;
  static constexpr int kStores = (1 << kTurnLog) / kChunkLines / kCopyThreads;

  const CopyParams& copy;
  const unsigned char* flags;  ///< of the side that has the experts, 0: not used; null: all are
  int first_line, first_column;
  int log_loads;   ///< across a line
  int log_lanes;   ///< of them, in a warp
  int log_chunks;  ///< of a column

  __device__ TurnTile(const CopyParams& copy, const unsigned char* flags, int first_line,
                      int first_column)
      : copy(copy),
        flags(flags),
        first_line(first_line),
        first_column(first_column),
        log_loads(copy.log_columns - kLogColumns),
        log_lanes(min(3, log_loads)),
        log_chunks(kTurnLog - copy.log_columns - kLogLines - 2) {}

  __device__ __forceinline__ bool columns_have_flags() const {
    return flags && (copy.columns.inner_is_expert || copy.columns.outer_is_expert);
  }
  __device__ __forceinline__ bool lines_have_flags() const {
    return flags && (copy.lines.inner_is_expert || copy.lines.outer_is_expert);
  }

  /// The load and the word that a thread's unit stands for.
  __device__ __forceinline__ void find(int unit, int& load, int& word) const {
    const int in_warp = unit % kWarpSize, rest = unit / kWarpSize;
    const int log_more = log_loads - log_lanes;
    load = (in_warp & ((1 << log_lanes) - 1)) | (rest & ((1 << log_more) - 1)) << log_lanes;
    word = in_warp >> log_lanes | rest >> log_more << (5 - log_lanes);
  }

  __device__ __forceinline__ int swizzled(int chunk) const {
    const int shift = max(3, log_chunks + kLogColumns);
    return chunk ^ ((chunk >> shift << (3 - log_lanes)) & 7);
  }

  __device__ __forceinline__ bool any_used(int column) const {
    if constexpr (kColumns == 4) {
      return *reinterpret_cast<const std::uint32_t*>(flags + column) != 0;
    } else {
      return *reinterpret_cast<const std::uint64_t*>(flags + column) != 0;
    }
  }

  __device__ __forceinline__ void load(uint4 (&loaded)[kLoads][kLines]) const {
    const From* const from = static_cast<const From*>(copy.from);
    const CopySide &columns = copy.columns, &lines = copy.lines;
    const bool column_flags = columns_have_flags(), line_flags = lines_have_flags();
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int load, word;
      find(i * kCopyThreads + static_cast<int>(threadIdx.x), load, word);
      const int column = first_column + load * kColumns, line = first_line + word * kLines;
      bool wanted = column < columns.extent && line < lines.extent;
      if (column_flags) wanted = wanted && any_used(load * kColumns);
      if (line_flags) wanted = wanted && flags[word * kLines];
      const int column_outer =
          static_cast<int>(columns.divisor.divide(static_cast<unsigned>(column)));
      const int line_outer = static_cast<int>(lines.divisor.divide(static_cast<unsigned>(line)));
      const int inner = line - line_outer * lines.inner;
      const From* source = from + column_outer * columns.from_outer +
                           (column - column_outer * columns.inner) * columns.from_inner +
                           line_outer * lines.from_outer + inner * lines.from_inner;
      wanted = wanted && line_outer < lines.given_outer;
#pragma unroll
      for (int l = 0; l < kLines; ++l) {
        loaded[i][l] = make_uint4(0, 0, 0, 0);
        if (wanted && inner + l < lines.given_inner) {
          loaded[i][l] = __ldcs(reinterpret_cast<const uint4*>(source + l * lines.from_inner));
        }
      }
    }
  }

  static __device__ __forceinline__ void as_floats(const uint4& bits, float (&values)[kColumns]) {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kColumns == 4) {
        values[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = pair_to_float(words[i], From());
        values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
      }
    }
  }

  __device__ __forceinline__ void leave(const uint4 (&loaded)[kLoads][kLines],
                                        unsigned* shared) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int load, word;
      find(i * kCopyThreads + static_cast<int>(threadIdx.x), load, word);
      float values[kLines][kColumns];
#pragma unroll
      for (int l = 0; l < kLines; ++l) as_floats(loaded[i][l], values[l]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int chunk = ((load * kColumns + c) << log_chunks) + word / 4;
        unsigned bits;
        if constexpr (kLines == 1) {
          bits = __float_as_uint(values[0][c] * copy.scaling);
        } else {
          bits = round_pair(values[0][c] * copy.scaling, values[1][c] * copy.scaling, To());
        }
        shared[swizzled(chunk) * 4 + word % 4] = bits;
      }
    }
  }

  __device__ __forceinline__ void store(const unsigned* shared) const {
    To* const to = static_cast<To*>(copy.to);
    const CopySide &columns = copy.columns, &lines = copy.lines;
    const bool column_flags = columns_have_flags(), line_flags = lines_have_flags();
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      const int chunk = i * kCopyThreads + static_cast<int>(threadIdx.x);
      const int own_column = chunk >> log_chunks;
      const int own_line = (chunk & ((1 << log_chunks) - 1)) * kChunkLines;
      const int column = first_column + own_column, line = first_line + own_line;
      if (column >= columns.extent || line >= lines.extent) continue;
      if (column_flags && !flags[own_column]) continue;
      if (line_flags && !flags[own_line]) continue;
      const int column_outer =
          static_cast<int>(columns.divisor.divide(static_cast<unsigned>(column)));
      const int line_outer = static_cast<int>(lines.divisor.divide(static_cast<unsigned>(line)));
      To* const target = to + column_outer * columns.to_outer +
                         (column - column_outer * columns.inner) * columns.to_inner +
                         line_outer * lines.to_outer + (line - line_outer * lines.inner);
      *reinterpret_cast<uint4*>(target) =
          *reinterpret_cast<const uint4*>(shared + swizzled(chunk) * 4);
    }
  }
};

/// Which lines or columns of a tile have an expert with rows, and whether any has; by all threads
/// of a block. Experts are on one side.
__device__ __forceinline__ bool find_flags(const CopySide& side, const IndexArray& sizes, int first,
                                           int count, unsigned char* flags) {
  bool any = false;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kCopyThreads) {
    const bool used = first + i < side.extent && place(side, first + i, sizes).used;
    flags[i] = used;
    any = any || used;
  }
  return __syncthreads_or(any) != 0;
}

template <typename From, typename To>
__device__ void turn_vectors(const CopyParams& copy, const IndexArray& sizes, int first_line,
                             int first_column, unsigned* shared, unsigned char* flags) {
  const bool on_columns = copy.columns.inner_is_expert || copy.columns.outer_is_expert;
  if (sizes.data) {
    const bool any = find_flags(
        on_columns ? copy.columns : copy.lines, sizes, on_columns ? first_column : first_line,
        1 << (on_columns ? copy.log_columns : kTurnLog - copy.log_columns), flags);
    if (!any) return;
  }
  const TurnTile<From, To> tile(copy, sizes.data ? flags : nullptr, first_line, first_column);
  uint4 loaded[TurnTile<From, To>::kLoads][TurnTile<From, To>::kLines];
  tile.load(loaded);
  tile.leave(loaded, shared);
  __syncthreads();
  tile.store(shared);
}

}  // namespace moegemm::cuda
