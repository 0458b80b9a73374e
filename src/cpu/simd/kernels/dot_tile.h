#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/simd/kernel_table.h"
#include "cpu/simd/kernels/tile.h"

/// The tile of forward: some rows of X times four rows of W, along K.
///
/// Order of summation, the same for every tile and every number of rows: lane l of the accumulator
/// sums the elements k = l (mod lanes of a step) with k ascending, then reduce4 adds the lanes in
/// one fixed tree. A row's bits therefore depend on nothing but that row and the weights.
namespace moegemm::cpu::simd {
namespace {

/// A number of rows to prefetch that stands for one row, into the first-level cache.
constexpr int kOneRowToL1 = -1;

/// The rows of X that a tile multiplies, where they are.
template <class Isa, class T, int Rows>
struct ListedX {
  using Dot = typename Isa::template Dot<T>;
  const T* rows[Rows];
  template <int Pass, bool Partial>
  [[gnu::always_inline]] typename Dot::Reg load(int i, std::int64_t k, std::int64_t count) const {
    if constexpr (Partial) return Dot::template load_partial<Pass>(rows[i] + k, count);
    return Dot::template load<Pass>(rows[i] + k);
  }
};

/// The same from a packed chunk: [step][Rows][elements of a step], the last step filled up with
/// zeros. One stream of lines, which the hardware fetches ahead from L2 and which no stride of X
/// can send to the same few sets of L1.
template <class Isa, class T, int Rows>
struct PackedX {
  using Dot = typename Isa::template Dot<T>;
  const T* first;
  template <int Pass, bool Partial>
  [[gnu::always_inline]] typename Dot::Reg load(int i, std::int64_t k, std::int64_t) const {
    return Dot::template load<Pass>(first + k * Rows + i * Dot::kStep);
  }
};

template <class T>
struct DotTile {
  const T* const* x;     // [Rows]
  const void* packed_x;  // the packed chunk, if the tile reads one
  const T* w[4];
  const T* prefetch[4];  // rows to bring into L2 meanwhile
  std::int64_t begin;    // first element of this part of K
  std::int64_t steps;    // whole steps
  std::int64_t tail;     // elements after them, fewer than a step
  float* parked;         // accumulators between the parts of K: [Rows * 4][lanes]
  bool resume;           // start from parked instead of zero
  bool park;             // leave them there instead of reducing
  float* sums;           // [Rows][kStagedCols], four columns of each are written
};

/// One step at element k of every row; of a partial step `count` elements exist and the others read
/// as zero in both operands, so whatever lies past K, NaN included, adds 0 * 0.
template <class Isa, class T, int Rows, int Pass, bool Partial, class X>
[[gnu::always_inline]] inline void dot_step(typename Isa::Vec (&acc)[Rows][4], const X& x_rows,
                                            const T* const (&w_rows)[4], std::int64_t k,
                                            std::int64_t count) {
  using Dot = typename Isa::template Dot<T>;
  typename Dot::Reg x[Rows];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) x[i] = x_rows.template load<Pass, Partial>(i, k, count);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    typename Dot::Reg w;
    if constexpr (Partial) {
      w = Dot::template load_partial<Pass>(w_rows[j] + k, count);
    } else {
      w = Dot::template load<Pass>(w_rows[j] + k);
    }
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) acc[i][j] = Dot::accumulate(acc[i][j], x[i], w);
  }
}

template <class Isa, class T, int Rows, int Prefetch, bool Packed>
[[gnu::noinline]] void dot_tile(const DotTile<T>& tile) {
  using Vec = typename Isa::Vec;
  using Dot = typename Isa::template Dot<T>;
  Vec acc[Rows][4];
  load_tile<Isa>(acc, tile.resume ? tile.parked : nullptr, 4 * Isa::kLanes);

  std::conditional_t<Packed, PackedX<Isa, T, Rows>, ListedX<Isa, T, Rows>> x;
  const T* w[4];
  constexpr int kPrefetchRows = Prefetch == kOneRowToL1 ? 1 : Prefetch;
  const T* ahead[kPrefetchRows > 0 ? kPrefetchRows : 1];
  if constexpr (Packed) {
    x.first = static_cast<const T*>(tile.packed_x) + tile.begin * Rows;
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) x.rows[i] = tile.x[i] + tile.begin;
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) w[j] = tile.w[j] + tile.begin;
#pragma GCC unroll 4
  for (int p = 0; p < kPrefetchRows; ++p) ahead[p] = tile.prefetch[p] + tile.begin;

  const std::int64_t end = tile.steps * Dot::kStep;
  for (std::int64_t k = 0; k < end; k += Dot::kStep) {
#pragma GCC unroll 4
    for (int p = 0; p < kPrefetchRows; ++p) {
      if constexpr (Prefetch == kOneRowToL1) {
        Isa::prefetch_l1(ahead[p] + k);
      } else {
        Isa::prefetch_l2(ahead[p] + k);
      }
    }
    dot_step<Isa, T, Rows, 0, false>(acc, x, w, k, 0);
    if constexpr (Dot::kPasses == 2) dot_step<Isa, T, Rows, 1, false>(acc, x, w, k, 0);
  }
  if (tile.tail > 0) {
    dot_step<Isa, T, Rows, 0, true>(acc, x, w, end, tile.tail);
    if constexpr (Dot::kPasses == 2) dot_step<Isa, T, Rows, 1, true>(acc, x, w, end, tile.tail);
  }

  if (tile.park) {
    store_tile<Isa>(acc, tile.parked, 4 * Isa::kLanes);
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      Isa::store_quad(tile.sums + i * kStagedCols,
                      Isa::reduce4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
    }
  }
}

template <class T>
using DotTileFn = void (*)(const DotTile<T>&);

/// dot_tile for `rows` rows that prefetches `prefetch` lines per step: 0, 1, 2, 4 or kOneRowToL1.
template <class Isa, class T>
DotTileFn<T> select_dot_tile(std::int64_t rows, int prefetch) {
  return with_rows<Isa::kDotRows>(rows, [=](auto count) -> DotTileFn<T> {
    constexpr int kRows = count;
    if (prefetch == 0) return dot_tile<Isa, T, kRows, 0, false>;
    if (prefetch == 1) return dot_tile<Isa, T, kRows, 1, false>;
    if (prefetch == kOneRowToL1) return dot_tile<Isa, T, kRows, kOneRowToL1, false>;
    return prefetch == 2 ? dot_tile<Isa, T, kRows, 2, false> : dot_tile<Isa, T, kRows, 4, false>;
  });
}

/// The same with packed X, which only comes with so many rows that one line per step is enough.
template <class Isa, class T>
DotTileFn<T> select_packed_tile(std::int64_t rows, int prefetch) {
  return with_rows<Isa::kDotRows>(rows, [=](auto count) -> DotTileFn<T> {
    constexpr int kRows = count;
    if (prefetch == kOneRowToL1) return dot_tile<Isa, T, kRows, kOneRowToL1, true>;
    return prefetch == 0 ? dot_tile<Isa, T, kRows, 0, true> : dot_tile<Isa, T, kRows, 1, true>;
  });
}

}  // namespace
}  // namespace moegemm::cpu::simd
