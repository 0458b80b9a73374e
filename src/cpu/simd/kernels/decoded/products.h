#pragma once

#include <cstdint>

#include "cpu/simd/kernels/decoded/readers.h"
#include "cpu/simd/kernels/dot.h"
#include "cpu/simd/kernels/dx/in_place.h"

/// Forward and dX of a few rows of bf16 with quantised weights: decoded values go from one register
/// to the next, not through scratch memory. What has no reader, and more rows, are left to the
/// kernels that decode into scratch. The sums have the same order, so their bits are the same.
namespace moegemm::cpu::simd {
namespace {

/// Most rows, by the registers that are left for their sums.
template <class Isa>
constexpr int kReadDotRows = Isa::kFewRegisters ? 3 : 4;
template <class Isa>
constexpr int kReadDxRows = Isa::kFewRegisters ? 2 : 4;

/// Rows of X times weight rows n to n + 3, all of K: dot_tile with decoded weights. `x` is packed:
/// [vector][Rows][elements of a vector]. The lines of the four rows that are read after the next
/// four are fetched meanwhile.
template <class Unit, int Rows, class Reader>
[[gnu::noinline]] void decoded_dot_tile(const Reader& reader, const typename Unit::Element* x,
                                        std::int64_t n, float* sums) {
  using Isa = typename Unit::Isa;
  constexpr int kVecs = Unit::kVecs;
  constexpr std::int64_t kElems = kReadCols / kVecs;
  typename Isa::Vec acc[Rows][4];
  load_tile<Isa>(acc, nullptr, 0);
  const std::uint8_t* ahead = reader.bytes(n + 8, 0);
  for (std::int64_t k = 0; k < reader.w.k; k += kReadCols) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      typename Unit::Columns w;
      reader.template columns<true>(n + j, j, k, w);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
#pragma GCC unroll 4
        for (int i = 0; i < Rows; ++i) {
          acc[i][j] = Unit::accumulate(acc[i][j], x + (v * Rows + i) * kElems, w[v]);
        }
      }
    }
    x += kReadCols * Rows;
#pragma GCC unroll 4
    for (std::int64_t line = 0; line < Reader::kLinesOfFour; ++line) {
      Isa::prefetch_l2(ahead);
      ahead += 64;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
    Isa::store_quad(sums + i * kStagedCols,
                    Isa::reduce4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
  }
}

/// Columns of four weight rows that are decoded for more rows of X: as floats 4 KiB, which stay in
/// L1.
constexpr std::int64_t kReadPart = 256;

/// Some columns of rows that were begun together, into memory.
template <class Unit, class Reader>
void read_block(const Reader& reader, const WeightSpan& span, float* out, std::int64_t stride) {
  constexpr std::int64_t kElems = kReadCols / Unit::kVecs;
  for (std::int64_t r = 0; r < span.rows; ++r) {
    const std::uint8_t* ahead = reader.bytes(span.row + r + kGroupTerms, span.col);
    for (std::int64_t c = 0; c < span.cols; c += kReadCols) {
      typename Unit::Columns w;
      reader.template columns<true>(span.row + r, r, span.col + c, w);
#pragma GCC unroll 8
      for (int v = 0; v < Unit::kVecs; ++v) {
        Unit::Isa::store(out + r * stride + c + v * kElems, w[v]);
      }
    }
    for (std::int64_t at = 0; at < span.cols * Reader::kLinesOfFour / 4; at += 64) {
      Unit::Isa::prefetch_l2(ahead + at);
    }
  }
}

/// The tiles of all rows with weight rows n to n + 3, decoded part by part into memory. `x` is
/// packed in `chunks`.
template <class Unit, class Reader>
[[gnu::noinline]] void decoded_dot_tiles(const ForwardTask& task, const Reader& reader,
                                         const float* x, std::int64_t n, const RowChunks& chunks) {
  using Isa = typename Unit::Isa;
  alignas(64) float w[4 * kReadPart];
  for (std::int64_t k = 0; k < task.k; k += kReadPart) {
    const std::int64_t cols = task.k - k < kReadPart ? task.k - k : kReadPart;
    read_block<Unit>(reader, {task.packed_first + n, 4, k, cols}, w, kReadPart);
    DotTile<float> tile = {};
    for (int j = 0; j < 4; ++j) tile.w[j] = w + j * kReadPart;
    tile.steps = cols / Isa::kLanes;
    tile.resume = k > 0;
    tile.park = k + cols < task.k;
    std::int64_t row = 0;
    for (std::int64_t c = 0; c < chunks.count; ++c) {
      const std::int64_t rows = chunks.rows(c);
      tile.packed_x = x + row * task.k + k * rows;
      tile.parked = task.parked + row * 4 * Isa::kLanes;
      tile.sums = task.staged + row * kStagedCols + n % kStagedCols;
      select_packed_tile<Isa, float>(rows, 0)(tile);
      row += rows;
    }
  }
}

/// forward_task, in registers where that is possible.
template <class Unit>
void decoded_forward_task(const ForwardTask& task) {
  using Isa = typename Unit::Isa;
  constexpr int kMost = kReadDotRows<Isa>;
  const RowChunks chunks(task.rows, task.rows <= kMost ? kMost : Isa::kDotRows);
  const bool suits = task.packed_w != nullptr && (task.rows <= kMost || Unit::kReadsBlocks) &&
                     task.low.rank == 0 && task.w_rows % 4 == 0 &&
                     task.rows * task.k <= kWidenedFloats;
  const ReaderKind kind =
      suits ? reader_of<Unit>(*task.packed_w, {task.packed_first, task.w_rows, 0, task.k})
            : ReaderKind::kNone;
  if (kind == ReaderKind::kNone) return forward_task<Isa, Bf16>(task);
  auto* const x = reinterpret_cast<typename Unit::Element*>(static_cast<Bf16*>(task.decoded) +
                                                            forward_decoded_elems(task.k));
  for (std::int64_t c = 0, row = 0; c < chunks.count; row += chunks.rows(c++)) {
    for (std::int64_t i = 0; i < chunks.rows(c); ++i) {
      Unit::pack_row(static_cast<const Bf16*>(task.x[row + i]), task.k, chunks.rows(c),
                     x + row * task.k + i * (kReadCols / Unit::kVecs));
    }
  }
  with_reader<Unit>(kind, *task.packed_w, task.decoded, 0, [&](const auto& reader) {
    for (std::int64_t n = 0; n < task.w_rows; n += 4) {
      const std::int64_t row = task.packed_first + n;
      reader.begin_rows({row, 4, 0, task.k}, n == 0);
      fetch_scales<Isa>(*task.packed_w, {row + 8, 4, 0, task.k});
      if (task.rows <= kMost) {
        with_rows<kMost>(task.rows, [&](auto rows) {
          decoded_dot_tile<Unit, rows>(reader, x, row, task.staged + n % kStagedCols);
        });
      } else if constexpr (Unit::kReadsBlocks) {
        decoded_dot_tiles<Unit>(task, reader, x, n, chunks);
      }
      if ((n + 4) % kStagedCols != 0 && n + 4 < task.w_rows) continue;
      const std::int64_t begin = n / kStagedCols * kStagedCols;
      finish_staged<Isa>(task, 0, task.rows, begin, n + 4 - begin);
    }
  });
}

/// in_place_group with decoded weights, from weight row `term` and column `first_col` on.
template <class Unit, int Rows, class Math, class Reader>
[[gnu::noinline]] void decoded_group(const WeightGroup<Math, Bf16>& group, const Reader& reader,
                                     std::int64_t term, std::int64_t first_col) {
  using Isa = typename Unit::Isa;
  constexpr int kVecs = kReadCols / Isa::kLanes;
  for (std::int64_t c = 0; c < group.cols; c += kReadCols) {
    const std::int64_t col = first_col + c;
    typename Isa::Vec acc[Rows][kVecs];
    load_tile<Isa>(acc, group.starts_fold ? nullptr : group.sums + c, group.padded_cols);
    for (std::int64_t step = 0; step < group.terms / Math::kTerms; ++step) {
      const std::int64_t in_group = step * Math::kTerms;
      typename Math::Step b[kVecs];
      Isa::prefetch_l2(reader.bytes(term + in_group + kGroupTerms, col));
      if constexpr (Math::kTerms == 1) {
        reader.template columns<false>(term + in_group, in_group, col, b);
      } else {
        Isa::prefetch_l2(reader.bytes(term + in_group + 1 + kGroupTerms, col));
        typename Unit::Columns lower, upper;
        reader.template columns<false>(term + in_group, in_group, col, lower);
        reader.template columns<false>(term + in_group + 1, in_group + 1, col, upper);
        Math::interleave(b, lower[0], upper[0]);
        Math::interleave(b + 2, lower[1], upper[1]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < Rows; ++i) {
        const typename Math::Step word = Math::broadcast(group.words + i * kFoldSteps + step);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) acc[i][v] = Math::accumulate(acc[i][v], word, b[v]);
      }
    }
    if (!group.ends_fold) {
      store_tile<Isa>(acc, group.sums + c, group.padded_cols);
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < Rows && Reader::kEvensFirst; ++i) Unit::join_columns(acc[i]);
      fold<Math, Rows, kVecs>(acc, group.totals + c, group.padded_cols, group.first_fold);
    }
  }
}

/// The same for more rows, through memory.
template <class Unit, class Math, class Reader>
[[gnu::noinline]] void decoded_blocks(const DxTask& task, const WeightGroup<Math, Bf16>& group,
                                      const Reader& reader, std::int64_t term) {
  alignas(64) float w[kGroupTerms * kReadCols];
  WeightGroup<Math, float> block = {};
  block.w = w;
  block.stride = kReadCols;
  block.terms = group.terms;
  block.cols = kReadCols;
  block.words = group.words;
  block.padded_cols = group.padded_cols;
  block.starts_fold = group.starts_fold;
  block.ends_fold = group.ends_fold;
  block.first_fold = group.first_fold;
  for (std::int64_t c = 0; c < group.cols; c += kReadCols) {
    block.sums = group.sums + c;
    block.totals = group.totals + c;
    read_block<Unit>(reader, {term, group.terms, task.packed_first + c, kReadCols}, w, kReadCols);
    add_group<Math, float, Unit>(task, block);
  }
}

/// What dx_in_place asks about each group of quantised weight rows: whether it was added here.
template <class Unit, class Math>
class DecodedInRegisters {
 public:
  bool add(const DxTask& task, const PackedWeights& w, std::int64_t term,
           const WeightGroup<Math, Bf16>& group) {
    using Isa = typename Unit::Isa;
    constexpr std::int64_t kFoldTerms = kFoldSteps * Math::kTerms;
    constexpr int kMost = kReadDxRows<Isa>;
    if ((task.rows > kMost && !Unit::kReadsBlocks) || task.n % Math::kTerms != 0) return false;
    // One answer for all groups of a fold, whose sums have one order of columns.
    const bool starts = term % kFoldTerms == 0;
    if (starts) {
      const std::int64_t left = task.n - term;
      const WeightSpan fold = {term, left < kFoldTerms ? left : kFoldTerms, task.packed_first,
                               task.cols};
      if (term == 0) fetch_scales<Isa>(w, fold);
      kind_ = reader_of<Unit>(w, fold);
    }
    if (kind_ == ReaderKind::kNone) return false;
    fetch_scales<Isa>(w, {term + kFoldTerms, group.terms, task.packed_first, task.cols});
    with_reader<Unit>(kind_, w, task.decoded, task.packed_first, [&](const auto& reader) {
      reader.begin_rows({term, group.terms, task.packed_first, task.cols}, starts);
      if (task.rows <= kMost) {
        with_rows<kMost>(task.rows, [&](auto rows) {
          decoded_group<Unit, rows>(group, reader, term, task.packed_first);
        });
      } else if constexpr (Unit::kReadsBlocks) {
        decoded_blocks<Unit>(task, group, reader, term);
      }
    });
    return true;
  }

 private:
  ReaderKind kind_ = ReaderKind::kNone;
};

/// The kernels of bf16 with those in place of what decodes into scratch for any number of rows.
template <class Unit, class Math>
constexpr KernelTable with_decoded_registers(KernelTable table) {
  DTypeKernels& bf16 = table.formats[0];
  bf16.forward = decoded_forward_task<Unit>;
  bf16.dx_in_place = dx_in_place<Math, Bf16, DecodedInRegisters<Unit, Math>>;
  return table;
}

}  // namespace
}  // namespace moegemm::cpu::simd
