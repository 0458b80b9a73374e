#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/simd/kernels/element.h"

/// What forward copies before its tiles run: the rows of X, and where that pays four rows of W.
namespace moegemm::cpu::simd {
namespace {

/// Sixteen registers hold twelve sums and the four operands of a step, and nothing to convert
/// 16-bit numbers with: the sums would wait in memory. So the tiles of many rows read floats, in
/// the order in which the tiles of few rows make them: step by step, pass by pass. Their sums are
/// those of floats, and have the same bits.
template <class Isa, class T>
constexpr bool kWidens = Isa::kFewRegisters && sizeof(T) == 2;
/// What the tiles of many rows read.
template <class Isa, class T>
using TileElement = std::conditional_t<kWidens<Isa, T>, float, T>;

/// The `count` elements of a row from a step's first on, as floats, up to a whole step. Vectors of
/// a step are `stride` floats apart.
template <class Isa, class T>
[[gnu::always_inline]] inline void widen_row(const T* row, std::int64_t count, std::int64_t stride,
                                             float* out) {
  using Dot = typename Isa::template Dot<T>;
  std::int64_t k = 0;
  for (; k + Dot::kStep <= count; k += Dot::kStep, out += Dot::kPasses * stride) {
    Isa::store(out, Dot::template load<0>(row + k));
    if constexpr (Dot::kPasses == 2) Isa::store(out + stride, Dot::template load<1>(row + k));
  }
  if (k == count) return;
  Isa::store(out, Dot::template load_partial<0>(row + k, count - k));
  if constexpr (Dot::kPasses == 2) {
    Isa::store(out + stride, Dot::template load_partial<1>(row + k, count - k));
  }
}

/// The rows of a task in chunks of one tile each, of sizes that differ by one at most.
struct RowChunks {
  std::int64_t count;
  std::int64_t shorter;  // rows of a chunk; the first `longer` chunks have one more
  std::int64_t longer;
  RowChunks(std::int64_t rows, std::int64_t most)
      : count((rows + most - 1) / most), shorter(rows / count), longer(rows % count) {}
  std::int64_t rows(std::int64_t chunk) const { return shorter + (chunk < longer ? 1 : 0); }
};
/// Rows of a tile that reads X in place: of numbers that are converted in two passes, one row less
/// than there are registers for the sums.
template <class Isa, class T>
constexpr int kListedRows =
    Isa::kFewRegisters&& Isa::template Dot<T>::kPasses == 2 ? Isa::kDotRows - 1 : Isa::kDotRows;

/// Gathered rows lie anywhere: each is fetched while the one this many before it is copied.
constexpr std::int64_t kPackAheadX = 3;

/// Packs the X rows of a task for PackedX of TileElement, chunk after chunk.
template <class Isa, class T>
void pack_x(const void* const* rows, std::int64_t count, std::int64_t k, void* packed) {
  constexpr std::int64_t kStep = Isa::template Dot<T>::kStep;
  TileElement<Isa, T>* chunk = static_cast<TileElement<Isa, T>*>(packed);
  const std::int64_t steps = k / kStep;
  const std::int64_t tail = k - steps * kStep;
  const RowChunks chunks(count, Isa::kDotRows);
  std::int64_t packed_rows = 0;
  for (std::int64_t c = 0; c < chunks.count; ++c) {
    const std::int64_t chunk_rows = chunks.rows(c);
    for (std::int64_t i = 0; i < chunk_rows; ++i, ++packed_rows) {
      const T* row = static_cast<const T*>(rows[packed_rows]);
      const std::int64_t later = packed_rows + kPackAheadX;
      const T* ahead = static_cast<const T*>(rows[later < count ? later : packed_rows]);
      if constexpr (kWidens<Isa, T>) {
        for (std::int64_t s = 0; s < steps; ++s) Isa::prefetch_l2(ahead + s * kStep);
        widen_row<Isa>(row, k, chunk_rows * Isa::kLanes, chunk + i * Isa::kLanes);
      } else {
        T* to = chunk + i * kStep;
        for (std::int64_t s = 0; s < steps; ++s, to += chunk_rows * kStep) {
          Isa::prefetch_l2(ahead + s * kStep);
          __builtin_memcpy(to, row + s * kStep, kStep * sizeof(T));
        }
        if (tail > 0) {
          __builtin_memset(to, 0, kStep * sizeof(T));
          __builtin_memcpy(to, row + steps * kStep, static_cast<std::size_t>(tail) * sizeof(T));
        }
      }
    }
    chunk += chunk_rows * (steps + (tail > 0 ? 1 : 0)) * kStep;
  }
}

}  // namespace
}  // namespace moegemm::cpu::simd
