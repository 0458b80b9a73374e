#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/simd/kernels/decode.h"
#include "cpu/simd/kernels/dot.h"
#include "cpu/simd/kernels/dx/in_place.h"

/// Forward and dX of a few rows with quantised weights: decoded values go from one register to the
/// next, not through scratch memory. For vectors of 32 bf16 (`Isa::Words`), and where groups of
/// values fit vectors and tiles; what does not is left to the kernels that decode into scratch. The
/// sums have the same order, so their bits are the same.
namespace moegemm::cpu::simd {
namespace {

/// Most rows: more sums leave no registers for the tables.
constexpr std::int64_t kMaxRegisterRows = 4;
/// Columns of a tile of dX, and the least that a table serves of fp8.
constexpr std::int64_t kRegisterCols = 64;

/// Nibbles of W_e. Block: values of a group, 32 or more.
template <class Isa, bool HighFirst, TableSource Source, std::int64_t Block>
struct NibbleReader {
  static constexpr bool kTableForAllRows = false;
  static constexpr std::int64_t kScaleBytes = Source == TableSource::kStored    ? 1
                                              : Source == TableSource::kShifted ? 2
                                                                                : 4;
  const PackedWeights w;
  const std::int64_t row_bytes = w.k / 2;
  const std::int64_t row_scales = w.k / Block;

  static bool fits(const PackedWeights& weights, std::int64_t, std::int64_t, std::int64_t col,
                   std::int64_t cols) {
    return weights.block_k_shift == (Block == 32 ? 5 : 6) &&
           ((weights.k | col | cols) & (Block - 1)) == 0;
  }
  void begin_rows(std::int64_t, std::int64_t, std::int64_t) const {}
  /// Brings the scales of these columns of some rows: a miss for each row would take as long as
  /// decoding it.
  [[gnu::always_inline]] void fetch_scales(std::int64_t row, std::int64_t rows, std::int64_t col,
                                           std::int64_t cols) const {
    const auto* scales = static_cast<const std::uint8_t*>(w.scales);
    for (std::int64_t r = row; r < row + rows; ++r) {
      const std::int64_t first = (r * row_scales + col / Block) * kScaleBytes;
      const std::int64_t end = first + cols / Block * kScaleBytes;
      for (std::int64_t at = first; at < end + 63; at += 64) Isa::prefetch_l2(scales + at);
    }
  }
  const std::uint8_t* bytes(std::int64_t row, std::int64_t col) const {
    return w.values + row * row_bytes + col / 2;
  }
  static constexpr std::int64_t bytes_of(std::int64_t values) { return values / 2; }
  [[gnu::always_inline]] auto table(std::int64_t row, std::int64_t col) const {
    return table_of_group<Isa, Bf16, Source>(w, row * row_scales + col / Block);
  }
  /// 32 values to each vector.
  template <class Table, class Words, int Count>
  [[gnu::always_inline]] static void read(const std::uint8_t* bytes, const Table& table,
                                          Words (&words)[Count]) {
    if constexpr (Count == 1) {
      words[0] = Isa::template nibble_words<HighFirst>(bytes, table);
    } else {
      Isa::template nibble_words<HighFirst>(bytes, table, words);
    }
  }
  /// 64 columns for dX, where their order does not matter: the even ones first, which takes fewer
  /// shuffles.
  static constexpr bool kEvensFirst = true;
  [[gnu::always_inline]] auto wide_table(std::int64_t row, std::int64_t col) const {
    if constexpr (Block >= kRegisterCols) return table(row, col);
    if constexpr (Source == TableSource::kShifted) {
      const auto* bits =
          static_cast<const std::uint16_t*>(w.scales) + row * row_scales + col / Block;
      if (shifts_table(bits[0]) && shifts_table(bits[1])) {
        const Bf16* const tables = static_cast<const Bf16*>(w.tables);
        return Isa::shift_tables(tables + kTableElems * (bits[0] & 0xff),
                                 tables + kTableElems * (bits[1] & 0xff), bits);
      }
    }
    return Isa::join_tables(table(row, col), table(row, col + Block));
  }
  template <class Table, class Words>
  [[gnu::always_inline]] static void read_columns(const std::uint8_t* bytes, const Table& table,
                                                  Words (&words)[2]) {
    Isa::template nibble_columns<HighFirst, (Block < kRegisterCols)>(Isa::load_nibbles(bytes),
                                                                     table, words);
  }
  static constexpr std::int64_t kTableCols = Block;
};

/// Values of e4m3 with blocks of 128 x 128, so that the rows and columns of a tile share a table.
/// Those of the columns of 128 rows are made once, in `tables`.
template <class Isa>
struct Fp8Reader {
  static constexpr bool kTableForAllRows = true;
  static constexpr std::int64_t kTableCols = 128;
  const PackedWeights w;
  std::uint8_t* const tables;
  const std::int64_t first_table;
  const std::int64_t row_bytes = w.k;

  static bool fits(const PackedWeights& weights, std::int64_t row, std::int64_t rows,
                   std::int64_t col, std::int64_t cols) {
    return weights.byte_lookups && weights.block_n == 128 && weights.block_k_shift == 7 &&
           weights.scale_columns > 1 && row % kGroupTerms == 0 &&
           ((weights.k | col | cols) & (kRegisterCols - 1)) == 0 &&
           have_tables(weights, row, rows, col, cols);
  }
  /// Whether a table can serve each of the scales.
  static bool have_tables(const PackedWeights& weights, std::int64_t row, std::int64_t rows,
                          std::int64_t col, std::int64_t cols) {
    for (std::int64_t r = row / 128; r <= (row + rows - 1) / 128; ++r) {
      for (std::int64_t c = col / 128; c <= (col + cols - 1) / 128; ++c) {
        if (!fits_fp8_table(scale_value<Isa>(weights, r * weights.scale_columns + c))) return false;
      }
    }
    return true;
  }
  /// To be called before the first of 128 rows is read.
  void begin_rows(std::int64_t row, std::int64_t col, std::int64_t cols) const {
    for (std::int64_t c = col / 128; c <= (col + cols - 1) / 128; ++c) {
      const float scale = scale_value<Isa>(w, row / 128 * w.scale_columns + c);
      const typename Isa::Fp8Table table(Isa::template make_table<Bf16>(kFp8Values, scale));
      Isa::store_fp8_bytes(table, tables + (c - first_table) * Isa::kFp8TableBytes);
    }
  }
  void fetch_scales(std::int64_t, std::int64_t, std::int64_t, std::int64_t) const {}
  const std::uint8_t* bytes(std::int64_t row, std::int64_t col) const {
    return w.values + row * row_bytes + col;
  }
  static constexpr std::int64_t bytes_of(std::int64_t values) { return values; }
  [[gnu::always_inline]] auto table(std::int64_t, std::int64_t col) const {
    return typename Isa::Fp8Bytes(tables + (col / 128 - first_table) * Isa::kFp8TableBytes);
  }
  template <class Words>
  [[gnu::always_inline]] static void read(const std::uint8_t* bytes,
                                          const typename Isa::Fp8Bytes& table, Words (&words)[2]) {
    Isa::fp8_words(bytes, table, words);
  }
  static constexpr bool kEvensFirst = false;
  template <class Words>
  [[gnu::always_inline]] static void read_columns(const std::uint8_t* bytes,
                                                  const typename Isa::Fp8Bytes& table,
                                                  Words (&words)[2]) {
    read(bytes, table, words);
  }
};

/// Calls body(reader) with the reader of a format, or returns false if there is none that can read
/// these rows and columns. What it keeps in `scratch` lasts from row to row.
template <class Isa, class Body>
bool with_reader(const PackedWeights& w, void* scratch, std::int64_t row, std::int64_t rows,
                 std::int64_t col, std::int64_t cols, const Body& body) {
  const auto run = [&]<class Reader>(std::type_identity<Reader>) {
    if (!Reader::fits(w, row, rows, col, cols)) return false;
    if constexpr (Reader::kTableForAllRows) {
      body(Reader{w, static_cast<std::uint8_t*>(scratch), col / Reader::kTableCols});
    } else {
      body(Reader{w});
    }
    return true;
  };
  switch (w.format) {
    case WeightFormat::kMxfp4:
      return run(std::type_identity<NibbleReader<Isa, false, TableSource::kStored, 32>>{});
    case WeightFormat::kNf4:
      return run(std::type_identity<NibbleReader<Isa, true, TableSource::kMade, 64>>{});
    case WeightFormat::kInt4:
      return w.tables != nullptr &&
             run(std::type_identity<NibbleReader<Isa, false, TableSource::kShifted, 32>>{});
    case WeightFormat::kFp8:
      return run(std::type_identity<Fp8Reader<Isa>>{});
    case WeightFormat::kPlain:
      break;
  }
  return false;
}

/// Rows of X times weight rows n to n + 3, all of K: dot_tile with decoded weights. The lines of
/// the four rows that are read after the next four are fetched meanwhile.
template <class Isa, int Rows, class Reader>
[[gnu::noinline]] void decoded_dot_tile(const Reader& reader, const Bf16* const* x, std::int64_t n,
                                        float* sums) {
  using Dot = typename Isa::template Dot<Bf16>;
  constexpr std::int64_t kStep = Dot::kStep;
  constexpr std::int64_t kCols = Reader::kTableCols < kRegisterCols ? kStep : kRegisterCols;
  typename Isa::Vec acc[Rows][4];
  load_tile<Isa>(acc, nullptr, 0);
  reader.fetch_scales(n + 8, 4, 0, reader.w.k);
  const std::uint8_t* const first = reader.bytes(n, 0);
  const std::uint8_t* ahead = first + 8 * reader.row_bytes;
  auto shared = reader.table(n, 0);
  for (std::int64_t k = 0; k < reader.w.k; k += kCols) {
    if constexpr (Reader::kTableForAllRows) {
      if (k % Reader::kTableCols == 0) shared = reader.table(n, k);
    }
    typename Dot::Reg x_steps[Rows][kCols / kStep];
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 2
      for (std::int64_t s = 0; s < kCols / kStep; ++s) {
        x_steps[i][s] = Dot::template load<0>(x[i] + k + s * kStep);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const auto use = [&](const auto& table) __attribute__((always_inline)) {
        typename Isa::Words w[kCols / kStep];
        Reader::read(first + j * reader.row_bytes + reader.bytes_of(k), table, w);
#pragma GCC unroll 2
        for (std::int64_t s = 0; s < kCols / kStep; ++s) {
#pragma GCC unroll 8
          for (int i = 0; i < Rows; ++i) {
            acc[i][j] = Dot::accumulate(acc[i][j], x_steps[i][s], (typename Dot::Reg)w[s]);
          }
        }
      };
      if constexpr (Reader::kTableForAllRows) {
        use(shared);
      } else {
        use(reader.table(n + j, k));
      }
    }
    for (std::int64_t line = 0; line < Reader::bytes_of(4 * kCols) / 64; ++line) {
      Isa::prefetch_l2(ahead);
      ahead += 64;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
    Isa::store_quad(sums + i * kStagedCols,
                    Isa::reduce4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
  }
}

/// forward_task, in registers where that is possible.
template <class Isa>
void decoded_forward_task(const ForwardTask& task) {
  const bool suits = task.packed_w != nullptr && task.rows <= kMaxRegisterRows &&
                     task.low.rank == 0 && task.w_rows % 4 == 0;
  const auto all_rows = [&](const auto& reader) {
    const auto* const* x = reinterpret_cast<const Bf16* const*>(task.x);
    for (std::int64_t n = 0; n < task.w_rows; n += 4) {
      const std::int64_t row = task.packed_first + n;
      if (n == 0 || row % 128 == 0) reader.begin_rows(row, 0, task.k);
      float* const sums = task.staged + n % kStagedCols;
      with_rows<kMaxRegisterRows>(
          task.rows, [&](auto rows) { decoded_dot_tile<Isa, rows>(reader, x, row, sums); });
      if ((n + 4) % kStagedCols != 0 && n + 4 < task.w_rows) continue;
      const std::int64_t begin = n / kStagedCols * kStagedCols;
      finish_staged<Isa>(task, 0, task.rows, begin, n + 4 - begin);
    }
  };
  if (suits && with_reader<Isa>(*task.packed_w, task.decoded, task.packed_first, task.w_rows, 0,
                                task.k, all_rows)) {
    return;
  }
  forward_task<Isa, Bf16>(task);
}

/// 64 columns of two weight rows.
template <class Math, class Reader, class Table>
[[gnu::always_inline]] inline void decoded_pairs(const Reader& reader, const std::uint8_t* bytes,
                                                 const Table& lower, const Table& upper,
                                                 typename Math::Step (&b)[4]) {
  typename Math::Isa::Words first[2], second[2];
  Reader::read_columns(bytes, lower, first);
  Reader::read_columns(bytes + reader.row_bytes, upper, second);
  Math::interleave(b, first[0], second[0]);
  Math::interleave(b + 2, first[1], second[1]);
}

/// in_place_columns with decoded weights, from weight row `term` and column `first_col` + `col` on.
template <class Math, int Rows, class Reader>
[[gnu::always_inline]] inline void decoded_columns(const WeightGroup<Math, Bf16>& group,
                                                   const Reader& reader, std::int64_t term,
                                                   std::int64_t first_col, std::int64_t col) {
  using Isa = typename Math::Isa;
  constexpr int kVecs = Isa::kTileVecs;
  static_assert(kVecs * Isa::kLanes == kRegisterCols && Math::kTerms == 2);
  typename Isa::Vec acc[Rows][kVecs];
  load_tile<Isa>(acc, group.starts_fold ? nullptr : group.sums + col, group.padded_cols);
  const std::uint8_t* bytes = reader.bytes(term, first_col + col);
  [[maybe_unused]] const auto shared = reader.table(term, first_col + col);
  for (std::int64_t step = 0; step < group.terms / 2; ++step) {
    Isa::prefetch_l2(bytes + kGroupTerms * reader.row_bytes);
    Isa::prefetch_l2(bytes + (kGroupTerms + 1) * reader.row_bytes);
    typename Math::Step b[kVecs];
    if constexpr (Reader::kTableForAllRows) {
      decoded_pairs<Math>(reader, bytes, shared, shared, b);
    } else {
      const std::int64_t row = term + 2 * step;
      decoded_pairs<Math>(reader, bytes, reader.wide_table(row, first_col + col),
                          reader.wide_table(row + 1, first_col + col), b);
    }
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) {
      const typename Math::Step word = Math::broadcast(group.words + i * kFoldSteps + step);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) acc[i][j] = Math::accumulate(acc[i][j], word, b[j]);
    }
    bytes += 2 * reader.row_bytes;
  }
  if (!group.ends_fold) {
    store_tile<Isa>(acc, group.sums + col, group.padded_cols);
  } else {
    if constexpr (Reader::kEvensFirst) Math::join_columns(acc);
    fold<Math, Rows, kVecs>(acc, group.totals + col, group.padded_cols, group.first_fold);
  }
}

template <class Math, int Rows, class Reader>
[[gnu::noinline]] void decoded_group(const WeightGroup<Math, Bf16>& group, const Reader& reader,
                                     std::int64_t term, std::int64_t first_col) {
  reader.fetch_scales(term + kGroupTerms, kGroupTerms, first_col, group.cols);
  for (std::int64_t col = 0; col < group.cols; col += kRegisterCols) {
    decoded_columns<Math, Rows>(group, reader, term, first_col, col);
  }
}

/// What dx_in_place asks about a group of quantised weight rows: whether it was added here.
template <class Math>
struct DecodedInRegisters {
  static bool add(const DxTask& task, const PackedWeights& w, std::int64_t term,
                  const WeightGroup<Math, Bf16>& group) {
    // The same answer for all groups of a fold, whose sums have one order of columns.
    if (task.rows > kMaxRegisterRows || task.n % 2 != 0 || task.cols % kRegisterCols != 0) {
      return false;
    }
    return with_reader<typename Math::Isa>(
        w, task.decoded, term, group.terms, task.packed_first, task.cols, [&](const auto& reader) {
          if (term % 128 == 0) reader.begin_rows(term, task.packed_first, task.cols);
          with_rows<kMaxRegisterRows>(task.rows, [&](auto rows) {
            decoded_group<Math, rows>(group, reader, term, task.packed_first);
          });
        });
  }
};

}  // namespace
}  // namespace moegemm::cpu::simd
