#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/simd/kernel_table.h"
#include "cpu/simd/kernels/decode.h"
#include "cpu/simd/kernels/element.h"
#include "cpu/simd/kernels/finish.h"
#include "cpu/simd/kernels/tile.h"

/// Forward: Y[r, n] is the dot product of an X row and a W row along K. W is read in place; X too
/// when few rows share it, otherwise from a packed copy.
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
  const T* const* x;  // [Rows]
  const T* packed_x;  // the packed chunk, if the tile reads one
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
    x.first = tile.packed_x + tile.begin * Rows;
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

/// dot_tile for `rows` rows that prefetches `prefetch` lines per step: 0, 1, 2, 4 or kOneRowToL1;
/// packed X only comes with so many rows that one line per step is enough.
template <class Isa, class T>
DotTileFn<T> select_dot_tile(std::int64_t rows, int prefetch, bool packed) {
  return with_rows<Isa::kDotRows>(rows, [=](auto count) -> DotTileFn<T> {
    constexpr int kRows = count;
    if (packed) {
      if (prefetch == kOneRowToL1) return dot_tile<Isa, T, kRows, kOneRowToL1, true>;
      return prefetch == 0 ? dot_tile<Isa, T, kRows, 0, true> : dot_tile<Isa, T, kRows, 1, true>;
    }
    if (prefetch == 0) return dot_tile<Isa, T, kRows, 0, false>;
    if (prefetch == 1) return dot_tile<Isa, T, kRows, 1, false>;
    if (prefetch == kOneRowToL1) return dot_tile<Isa, T, kRows, kOneRowToL1, false>;
    return prefetch == 2 ? dot_tile<Isa, T, kRows, 2, false> : dot_tile<Isa, T, kRows, 4, false>;
  });
}

/// The rows of a task in chunks of one tile each, of sizes that differ by one at most.
template <class Isa>
struct RowChunks {
  std::int64_t count;
  std::int64_t shorter;  // rows of a chunk; the first `longer` chunks have one more
  std::int64_t longer;
  explicit RowChunks(std::int64_t rows)
      : count((rows + Isa::kDotRows - 1) / Isa::kDotRows),
        shorter(rows / count),
        longer(rows % count) {}
  std::int64_t rows(std::int64_t chunk) const { return shorter + (chunk < longer ? 1 : 0); }
};

/// Gathered rows lie anywhere: each is fetched while the one this many before it is copied.
constexpr std::int64_t kPackAheadX = 3;

/// Packs the X rows of a task for PackedX, chunk after chunk.
template <class Isa, class T>
void pack_x(const void* const* rows, std::int64_t count, std::int64_t k, void* packed) {
  constexpr std::int64_t kStep = Isa::template Dot<T>::kStep;
  T* chunk = static_cast<T*>(packed);
  const std::int64_t steps = k / kStep;
  const std::int64_t tail = k - steps * kStep;
  const RowChunks<Isa> chunks(count);
  std::int64_t packed_rows = 0;
  for (std::int64_t c = 0; c < chunks.count; ++c) {
    const std::int64_t chunk_rows = chunks.rows(c);
    for (std::int64_t i = 0; i < chunk_rows; ++i, ++packed_rows) {
      const T* row = static_cast<const T*>(rows[packed_rows]);
      const std::int64_t later = packed_rows + kPackAheadX;
      const T* ahead = static_cast<const T*>(rows[later < count ? later : packed_rows]);
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
    chunk += chunk_rows * (steps + (tail > 0 ? 1 : 0)) * kStep;
  }
}

/// Row `group` * 4 + j of the weights that this worker reads: the block's own rows, then those of
/// its next block; null after that.
template <class T>
const T* weight_row_ahead(const ForwardTask& task, std::int64_t row) {
  if (row < task.w_rows) return static_cast<const T*>(task.w) + row * task.w_stride;
  row -= (task.w_rows + 3) / 4 * 4;
  if (row < 0 || row >= task.next_w_rows) return nullptr;
  return static_cast<const T*>(task.next_w) + row * task.w_stride;
}

/// Hands out the lines of up to four rows a few at a time. Into L1, from where they fall to L2:
/// with weights in small pages that made forward 2% faster than prefetches into L2 alone.
template <class Isa, class T>
class LinePrefetch {
 public:
  /// `turns`: how often fetch will be called at least.
  LinePrefetch(const T* const* rows, int count, std::int64_t k, std::int64_t turns)
      : rows_(rows),
        row_lines_((k * std::int64_t{sizeof(T)} + 63) / 64),
        left_(count * row_lines_),
        share_((left_ + turns - 1) / turns) {}

  std::int64_t share() const { return share_; }

  [[gnu::always_inline]] void fetch() {
    std::int64_t lines = share_ < left_ ? share_ : left_;
    left_ -= lines;
    while (lines > 0) {
      const std::int64_t run = row_lines_ - line_ < lines ? row_lines_ - line_ : lines;
      const char* at = reinterpret_cast<const char*>(*rows_) + line_ * 64;
      for (const char* end = at + run * 64; at < end; at += 64) Isa::prefetch_l1(at);
      lines -= run;
      line_ += run;
      if (line_ == row_lines_) {
        line_ = 0;
        ++rows_;
      }
    }
  }

 private:
  const T* const* rows_;
  std::int64_t row_lines_;
  std::int64_t left_;
  std::int64_t share_;
  std::int64_t line_ = 0;
};

/// Brings the lines that finish_staged is about to write, while there is still arithmetic to do:
/// stores wait for theirs in order.
template <class Isa>
void fetch_output_lines(const ForwardTask& task, std::int64_t row, std::int64_t rows,
                        std::int64_t col) {
  const std::int64_t element_bytes = task.out.dtype == DType::kFloat32 ? 4 : 2;
  const std::int64_t at = (task.out.first_col + col) * element_bytes;
  for (std::int64_t i = row; i < row + rows; ++i) {
    if (task.out.rows[i] == nullptr) continue;
    const char* lines = static_cast<const char*>(task.out.rows[i]) + at;
    for (std::int64_t byte = 0; byte < kStagedCols * element_bytes; byte += 64) {
      Isa::prefetch_write(lines + byte);
    }
  }
}

/// Rounds staged columns of some rows into Y.
template <class Isa>
void finish_staged(const ForwardTask& task, std::int64_t first, std::int64_t rows, std::int64_t col,
                   std::int64_t cols) {
  finish_rows<Isa>(task.out, first, rows, task.staged + first * kStagedCols, kStagedCols, col,
                   cols);
}

/// Four weight rows stay in L1 while all rows of the task pass by from L2. K is cut so that 4 + 6
/// rows of a part fit L1 (10 x 2 KiB of 32 KiB); with a single chunk of rows nothing is read twice
/// and K stays whole.
constexpr std::int64_t kDotPartBytes = 2816;
/// Packed rows come from L2 so evenly that some of the weights may come from there, too: K of up to
/// this stays whole, because a cut costs a store and a load of all accumulators. 4 KiB whole
/// measured 5% faster than in halves, 16 KiB in quarters 3% slower than in sixths.
constexpr std::int64_t kWholePackedBytes = 5120;

/// Lines of weights that are fetched at a time between tiles.
constexpr std::int64_t kMaxLinesBetweenTiles = 12;

/// The last part of the contraction: the low-rank one, of weight rows n to n + 3 of which `valid`
/// exist.
template <class T, std::int64_t Step>
void begin_low_rank(const LowRankPart& low, std::int64_t n, std::int64_t valid, DotTile<T>& tile) {
  tile.begin = 0;
  tile.steps = low.rank / Step;
  tile.tail = low.rank % Step;
  for (std::int64_t j = 0; j < 4; ++j) {
    tile.w[j] = static_cast<const T*>(low.w) + (n + (j < valid ? j : valid - 1)) * low.w_stride;
  }
}

/// Points a tile at four weight rows from `n` on, decoded first where W is quantised.
template <class Isa, class T>
void begin_weight_rows(const ForwardTask& task, std::int64_t n, std::int64_t valid,
                       DotTile<T>& tile) {
  static_assert(kForwardDecodedRows == 4);
  const bool decodes = task.packed_w != nullptr;
  T* const decoded = static_cast<T*>(task.decoded);
  const std::int64_t stride = decodes ? decoded_stride(task.k) : task.w_stride;
  if (decodes) {
    decode_block<Isa, T>(*task.packed_w, task.first_w_row + n, valid, 0, task.k, decoded, stride);
  }
  const T* const rows = decodes ? decoded : static_cast<const T*>(task.w) + n * stride;
  for (std::int64_t j = 0; j < 4; ++j) tile.w[j] = rows + (j < valid ? j : valid - 1) * stride;
}

template <class Isa, class T>
void forward_task(const ForwardTask& task) {
  using Dot = typename Isa::template Dot<T>;
  const T* const* x = reinterpret_cast<const T* const*>(task.x);
  const T* packed_x = static_cast<const T*>(task.packed_x);
  const RowChunks<Isa> chunks(task.rows);
  const std::int64_t steps = task.k / Dot::kStep;
  const std::int64_t packed_k = (task.k + Dot::kStep - 1) / Dot::kStep * Dot::kStep;
  const std::int64_t part_steps_max = kDotPartBytes / (Dot::kStep * std::int64_t{sizeof(T)});
  const bool whole = chunks.count == 1 ||
                     (packed_x != nullptr && task.k * std::int64_t{sizeof(T)} <= kWholePackedBytes);
  const std::int64_t parts = whole ? 1 : (steps + part_steps_max - 1) / part_steps_max;
  const std::int64_t part_steps = parts > 0 ? (steps + parts - 1) / parts : 0;

  // Two groups of four short rows leave L1 room enough for the group in use.
  const bool short_rows = task.k * std::int64_t{sizeof(T)} <= 1024;
  // The hardware follows rows of a few lines itself; prefetches would be a third of the loop.
  const bool fetch_ahead = task.k * std::int64_t{sizeof(T)} > 256 && task.packed_w == nullptr;
  DotTile<T> tile = {};
  for (std::int64_t n = 0; n < task.w_rows; n += 4) {
    // Past the last weight row the last one is computed again and not stored.
    const std::int64_t valid = task.w_rows - n < 4 ? task.w_rows - n : 4;
    begin_weight_rows<Isa, T>(task, n, valid, tile);
    // Two groups ahead: one is too late, eight measured worse.
    const T* ahead[4];
    int ahead_rows = 0;
    for (int j = 0; j < 4 && fetch_ahead; ++j) {
      const T* row = weight_row_ahead<T>(task, n + 8 + j);
      if (row != nullptr) ahead[ahead_rows++] = row;
    }
    // Many tiles: a few lines before each. Inside the loops of the first tiles alone they would
    // queue for the memory before the lines that those tiles need from L2.
    LinePrefetch<Isa, T> few_lines(ahead, ahead_rows, task.k,
                                   chunks.count * (parts > 0 ? parts : 1));
    const bool between_tiles = packed_x != nullptr && few_lines.share() <= kMaxLinesBetweenTiles;

    const std::int64_t all_parts = (parts > 0 ? parts : 1) + (task.low.rank > 0 ? 1 : 0);
    for (std::int64_t part = 0; part < all_parts; ++part) {
      const bool ends_k = part + 1 >= parts, last = part + 1 == all_parts;
      const bool low = last && task.low.rank > 0;
      tile.begin = part * part_steps * Dot::kStep;
      tile.steps = ends_k ? steps - part * part_steps : part_steps;
      tile.tail = ends_k ? task.k - steps * Dot::kStep : 0;
      tile.resume = part > 0;
      tile.park = !last;
      if (low) begin_low_rank<T, Dot::kStep>(task.low, n, valid, tile);
      std::int64_t row = 0;
      for (std::int64_t c = 0; c < chunks.count; ++c) {
        const std::int64_t rows = chunks.rows(c);
        const bool packed = packed_x != nullptr && !low;
        tile.x = (low ? reinterpret_cast<const T* const*>(task.low.rows) : x) + row;
        tile.packed_x = packed ? packed_x + row * packed_k : nullptr;
        tile.parked = task.parked + row * 4 * Isa::kLanes;
        // The rows ahead are shared out over the chunks.
        int prefetch = 0;
        if (between_tiles && !low) few_lines.fetch();
        for (std::int64_t j = between_tiles || low ? ahead_rows : c; j < ahead_rows;
             j += chunks.count) {
          tile.prefetch[prefetch++] = ahead[j];
        }
        if (prefetch == 3) prefetch = 2;
        if (prefetch == 1 && short_rows) prefetch = kOneRowToL1;
        if (last && n % kStagedCols == kStagedCols / 2) {
          fetch_output_lines<Isa>(task, row, rows, n - kStagedCols / 2);
        }
        // Just before the tile that needs their place: the stores wait while it computes.
        if (part == 0 && n > 0 && n % kStagedCols == 0) {
          finish_staged<Isa>(task, row, rows, n - kStagedCols, kStagedCols);
        }
        tile.sums = task.staged + row * kStagedCols + n % kStagedCols;
        select_dot_tile<Isa, T>(rows, prefetch, packed)(tile);
        row += rows;
      }
    }
  }
  const std::int64_t staged = (task.w_rows - 1) / kStagedCols * kStagedCols;
  finish_staged<Isa>(task, 0, task.rows, staged, task.w_rows - staged);
}

}  // namespace
}  // namespace moegemm::cpu::simd
