#pragma once

#include <cstdint>

#include "cpu/simd/kernel_table.h"
#include "cpu/simd/kernels/decode.h"
#include "cpu/simd/kernels/dot_tile.h"
#include "cpu/simd/kernels/element.h"
#include "cpu/simd/kernels/finish.h"
#include "cpu/simd/kernels/pack_x.h"

/// Forward: Y[r, n] is the dot product of an X row and a W row along K. W is read in place; X too
/// when few rows share it, otherwise from a packed copy. The order of the sums is that of
/// dot_tile.h.
namespace moegemm::cpu::simd {
namespace {

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
  const std::int64_t element_bytes =
      with_element_type(task.out.dtype, []<class T>(T*) { return std::int64_t{sizeof(T)}; });
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
    decode_block<Isa, T>(*task.packed_w, task.packed_first + n, valid, 0, task.k, decoded, stride);
  }
  const T* const rows = decodes ? decoded : static_cast<const T*>(task.w) + n * stride;
  for (std::int64_t j = 0; j < 4; ++j) tile.w[j] = rows + (j < valid ? j : valid - 1) * stride;
}

/// The tiles with packed X.
template <class Isa, class T, bool Widens = kWidens<Isa, T>>
struct PackedTiles {
  void begin_part(const DotTile<T>&) {}
  void run(const DotTile<T>& tile, std::int64_t rows, int prefetch) const {
    select_packed_tile<Isa, T>(rows, prefetch)(tile);
  }
};

/// The same over floats that stand for 16-bit numbers: of four weight rows, too, the part that the
/// tiles are at is widened first.
template <class Isa, class T>
class PackedTiles<Isa, T, true> {
  using Dot = typename Isa::template Dot<T>;

 public:
  void begin_part(const DotTile<T>& tile) {
    const std::int64_t count = tile.steps * Dot::kStep + tile.tail;
    for (int j = 0; j < 4; ++j) {
      widen_row<Isa>(tile.w[j] + tile.begin, count, Isa::kLanes, w_[j]);
    }
  }
  void run(const DotTile<T>& tile, std::int64_t rows, int) const {
    DotTile<float> wide = {};
    wide.packed_x = static_cast<const float*>(tile.packed_x) + tile.begin * rows;
    for (int j = 0; j < 4; ++j) wide.w[j] = w_[j];
    wide.steps = (tile.steps + (tile.tail > 0 ? 1 : 0)) * Dot::kPasses;
    wide.parked = tile.parked;
    wide.resume = tile.resume;
    wide.park = tile.park;
    wide.sums = tile.sums;
    select_packed_tile<Isa, float>(rows, 0)(wide);
  }

 private:
  // The longest part, and a line that keeps rows out of each other's sets of the cache.
  alignas(64) float w_[4][kWholePackedBytes / sizeof(float) + 16];
};

/// The rows ahead are shared out over the chunks: a chunk's are every `step`-th from `first` on.
/// Returns which loop of a tile fetches them.
template <class T>
int share_rows_ahead(DotTile<T>& tile, const T* const* ahead, std::int64_t first,
                     std::int64_t count, std::int64_t step, bool short_rows) {
  int prefetch = 0;
  for (std::int64_t j = first; j < count; j += step) tile.prefetch[prefetch++] = ahead[j];
  if (prefetch == 3) return 2;
  return prefetch == 1 && short_rows ? kOneRowToL1 : prefetch;
}

template <class Isa, class T>
void forward_task(const ForwardTask& task) {
  using Dot = typename Isa::template Dot<T>;
  const T* const* x = reinterpret_cast<const T* const*>(task.x);
  const auto* packed_x = static_cast<const TileElement<Isa, T>*>(task.packed_x);
  const RowChunks chunks(task.rows, packed_x != nullptr ? Isa::kDotRows : kListedRows<Isa, T>);
  const std::int64_t steps = task.k / Dot::kStep;
  const std::int64_t packed_k = (task.k + Dot::kStep - 1) / Dot::kStep * Dot::kStep;
  const std::int64_t element = packed_x != nullptr ? sizeof(*packed_x) : sizeof(T);
  const std::int64_t part_steps_max = kDotPartBytes / (Dot::kStep * element);
  const bool whole =
      chunks.count == 1 || (packed_x != nullptr && task.k * element <= kWholePackedBytes);
  const std::int64_t parts = whole ? 1 : (steps + part_steps_max - 1) / part_steps_max;
  const std::int64_t part_steps = parts > 0 ? (steps + parts - 1) / parts : 0;

  // Two groups of four short rows leave L1 room enough for the group in use.
  const bool short_rows = task.k * std::int64_t{sizeof(T)} <= 1024;
  // The hardware follows rows of a few lines itself; prefetches would be a third of the loop.
  const bool fetch_ahead = task.k * std::int64_t{sizeof(T)} > 256 && task.packed_w == nullptr;
  DotTile<T> tile = {};
  PackedTiles<Isa, T> packed_tiles;
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
    const bool between_tiles =
        packed_x != nullptr && (kWidens<Isa, T> || few_lines.share() <= kMaxLinesBetweenTiles);

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
      const bool packed = packed_x != nullptr && !low;
      if (packed) packed_tiles.begin_part(tile);
      std::int64_t row = 0;
      for (std::int64_t c = 0; c < chunks.count; ++c) {
        const std::int64_t rows = chunks.rows(c);
        tile.x = (low ? reinterpret_cast<const T* const*>(task.low.rows) : x) + row;
        tile.packed_x = packed ? packed_x + row * packed_k : nullptr;
        tile.parked = task.parked + row * 4 * Isa::kLanes;
        if (between_tiles && !low) few_lines.fetch();
        const std::int64_t first = between_tiles || low ? ahead_rows : c;
        const int prefetch =
            share_rows_ahead(tile, ahead, first, ahead_rows, chunks.count, short_rows);
        if (last && n % kStagedCols == kStagedCols / 2) {
          fetch_output_lines<Isa>(task, row, rows, n - kStagedCols / 2);
        }
        // Just before the tile that needs their place: the stores wait while it computes.
        if (part == 0 && n > 0 && n % kStagedCols == 0) {
          finish_staged<Isa>(task, row, rows, n - kStagedCols, kStagedCols);
        }
        tile.sums = task.staged + row * kStagedCols + n % kStagedCols;
        if (packed) {
          packed_tiles.run(tile, rows, prefetch);
        } else {
          select_dot_tile<Isa, T>(rows, prefetch)(tile);
        }
        row += rows;
      }
    }
  }
  const std::int64_t staged = (task.w_rows - 1) / kStagedCols * kStagedCols;
  finish_staged<Isa>(task, 0, task.rows, staged, task.w_rows - staged);
}

}  // namespace
}  // namespace moegemm::cpu::simd
