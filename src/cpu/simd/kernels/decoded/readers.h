#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/simd/kernels/decode.h"

/// Quantised weights as vectors in registers, 64 columns of a row at a time. `Unit` says what the
/// vectors hold: bf16 for machines that multiply them, else floats. Rows and columns that do not
/// fit such steps, and scales out of a format's ordinary range, have no reader.
namespace moegemm::cpu::simd {
namespace {

constexpr std::int64_t kReadCols = 64;

/// A block of rows and columns of W_e.
struct WeightSpan {
  std::int64_t row, rows, col, cols;
};

/// Which reader suits a span.
enum class ReaderKind { kNone, kStored, kShifted, kMade, kFp8 };

/// Brings the scales of some rows: a miss for each row would take as long as decoding it.
template <class Isa>
void fetch_scales(const PackedWeights& w, const WeightSpan& span) {
  if (w.format == WeightFormat::kFp8) return;  // which has few
  const auto* const scales = static_cast<const std::uint8_t*>(w.scales);
  const std::int64_t size = w.scale_type == ScaleType::kFloat32 ? 4
                            : w.scale_type == ScaleType::kE8m0  ? 1
                                                                : 2;
  const std::int64_t end_of_row = (span.cols >> w.block_k_shift) * size + 63;
  for (std::int64_t r = span.row; r < span.row + span.rows; ++r) {
    const std::uint8_t* const first = scales + ((r * w.k + span.col) >> w.block_k_shift) * size;
    for (std::int64_t at = 0; at < end_of_row; at += 64) Isa::prefetch_l2(first + at);
  }
}

/// The largest of the scales' bits, less `offset`, under a mask: one look at many instead of one
/// question for each.
template <class Bits>
Bits largest_scale(const PackedWeights& w, const WeightSpan& span, Bits offset, Bits mask) {
  typedef Bits Lanes __attribute__((vector_size(8)));  // short, as rows may have few scales
  constexpr std::int64_t kLanes = 8 / sizeof(Bits);
  const auto* const scales = static_cast<const Bits*>(w.scales);
  Lanes lanes = {};
  Bits rest = 0;
  for (std::int64_t r = span.row; r < span.row + span.rows; ++r) {
    std::int64_t s = (r * w.k + span.col) >> w.block_k_shift;
    const std::int64_t end = ((r * w.k + span.col + span.cols - 1) >> w.block_k_shift) + 1;
    for (; s + kLanes <= end; s += kLanes) {
      Lanes some;
      __builtin_memcpy(&some, scales + s, sizeof(some));
      some = (some - offset) & mask;
      lanes = some > lanes ? some : lanes;
    }
    for (; s < end; ++s) {
      const Bits bits = static_cast<Bits>(scales[s] - offset) & mask;
      rest = bits > rest ? bits : rest;
    }
  }
  for (std::int64_t i = 0; i < kLanes; ++i) rest = lanes[i] > rest ? lanes[i] : rest;
  return rest;
}

inline ReaderKind nibble_reader(const PackedWeights& w, const WeightSpan& span) {
  if (w.format == WeightFormat::kMxfp4) return ReaderKind::kStored;
  if (w.block_k_shift < (w.format == WeightFormat::kNf4 ? 6 : 5)) return ReaderKind::kNone;
  if (w.tables != nullptr &&
      largest_scale<std::uint16_t>(w, span, kLeastShift, 0xffff) < kShiftRange) {
    return ReaderKind::kShifted;
  }
  // Products with finite scales are rounded as integers.
  if (w.scale_type == ScaleType::kFloat32) {
    constexpr std::uint32_t kExponent = 0x7f800000;
    const bool finite = largest_scale<std::uint32_t>(w, span, 0, kExponent) < kExponent;
    return finite ? ReaderKind::kMade : ReaderKind::kNone;
  }
  const std::uint16_t exponent = w.scale_type == ScaleType::kBFloat16 ? 0x7f80 : 0x7c00;
  const bool finite = largest_scale<std::uint16_t>(w, span, 0, exponent) < exponent;
  return finite ? ReaderKind::kMade : ReaderKind::kNone;
}

template <class Unit>
ReaderKind fp8_reader(const PackedWeights& w, const WeightSpan& span) {
  const bool blocks = w.scale_columns > 1;
  if (!Unit::reads_fp8(w) || span.row % 4 != 0) return ReaderKind::kNone;
  if (blocks && (w.block_n != 128 || w.block_k_shift != 7)) return ReaderKind::kNone;
  const std::int64_t last_row = (span.row + span.rows - 1) / w.block_n;
  const std::int64_t last_col = blocks ? (span.col + span.cols - 1) / 128 : 0;
  for (std::int64_t r = span.row / w.block_n; r <= last_row; ++r) {
    for (std::int64_t c = blocks ? span.col / 128 : 0; c <= last_col; ++c) {
      const float scale = scale_value<typename Unit::Isa>(w, r * w.scale_columns + c);
      if (!fits_fp8_table(scale)) return ReaderKind::kNone;
    }
  }
  return ReaderKind::kFp8;
}

template <class Unit>
ReaderKind reader_of(const PackedWeights& w, const WeightSpan& span) {
  if (((w.k | span.col | span.cols) & (kReadCols - 1)) != 0) return ReaderKind::kNone;
  return w.format == WeightFormat::kFp8 ? fp8_reader<Unit>(w, span) : nibble_reader(w, span);
}

/// Nibbles in blocks of 32 values (TwoTables), or of more.
template <class Unit, bool HighFirst, TableSource Source, bool TwoTables>
struct NibbleReader {
  using Isa = typename Unit::Isa;
  using Columns = typename Unit::Columns;
  static constexpr bool kEvensFirst = true;
  static constexpr std::int64_t kLinesOfFour = 2;  ///< of memory, for kReadCols of four rows
  const PackedWeights w;

  const std::uint8_t* bytes(std::int64_t row, std::int64_t col) const {
    return w.values + (row * w.k + col) / 2;
  }
  static void begin_rows(const WeightSpan&, bool) {}
  [[gnu::always_inline]] auto table(std::int64_t scale) const {
    if constexpr (Source == TableSource::kStored) {
      return Unit::stored(w, static_cast<const std::uint8_t*>(w.scales)[scale]);
    } else if constexpr (Source == TableSource::kShifted) {
      return Unit::shifted(w, static_cast<const std::uint16_t*>(w.scales) + scale);
    } else if constexpr (HighFirst) {  // nf4, whose scales are floats
      return Unit::made(w.table_values, static_cast<const float*>(w.scales)[scale]);
    } else {
      return Unit::made(w.table_values, scale_value<Isa>(w, scale));
    }
  }
  /// kReadCols of a row, InOrder as forward wants them, else as dX does: the even ones first.
  template <bool InOrder>
  [[gnu::always_inline]] void columns(std::int64_t row, std::int64_t, std::int64_t col,
                                      Columns& to) const {
    const std::int64_t place = row * w.k + col;
    const std::int64_t scale = place >> w.block_k_shift;
    const std::uint8_t* const at = w.values + place / 2;
    if constexpr (TwoTables && !InOrder && Source == TableSource::kShifted && Unit::kJoinsTables) {
      const auto* const bits = static_cast<const std::uint16_t*>(w.scales) + scale;
      Unit::template joined_nibbles<HighFirst>(at, Unit::shifted_pair(w, bits), to);
    } else if constexpr (TwoTables) {
      Unit::template nibbles<HighFirst, InOrder, true>(at, table(scale), table(scale + 1), to);
    } else {
      const auto first = table(scale);
      Unit::template nibbles<HighFirst, InOrder, false>(at, first, first, to);
    }
  }
};

/// e4m3 with a scale for each row (OfRows), for 128 x 128 values or for all. What is looked up is
/// made in `tables`, for each of a few rows or for the columns of 128 rows.
template <class Unit, bool OfRows>
struct Fp8Reader {
  using Isa = typename Unit::Isa;
  using Columns = typename Unit::Columns;
  static constexpr bool kEvensFirst = Unit::kFp8EvensFirst;
  static constexpr std::int64_t kLinesOfFour = 4;
  const PackedWeights w;
  std::uint8_t* const tables;
  const std::int64_t first_col;
  const int shift = w.scale_columns > 1 ? 7 : 62;  ///< of columns, to the number of their scale

  const std::uint8_t* bytes(std::int64_t row, std::int64_t col) const {
    return w.values + row * w.k + col;
  }
  /// To be called for each few rows before they are read. `first`: nothing was made yet.
  void begin_rows(const WeightSpan& span, bool first) const {
    if constexpr (OfRows) {
      for (std::int64_t r = 0; r < span.rows; ++r) {
        Unit::store_fp8_table(scale_value<Isa>(w, span.row + r), tables + r * Unit::kFp8TableBytes);
      }
    } else if (first || span.row % 128 == 0) {
      const std::int64_t row = span.row / w.block_n * w.scale_columns;
      const std::int64_t last = (span.col + span.cols - 1) >> shift;
      std::uint8_t* at = tables;
      for (std::int64_t c = span.col >> shift; c <= last; ++c, at += Unit::kFp8TableBytes) {
        Unit::store_fp8_table(scale_value<Isa>(w, row + c), at);
      }
    }
  }
  /// Of a row, the `begun`-th of those that were begun together.
  template <bool InOrder>
  [[gnu::always_inline]] void columns(std::int64_t row, std::int64_t begun, std::int64_t col,
                                      Columns& to) const {
    const std::int64_t table = OfRows ? begun : (col >> shift) - (first_col >> shift);
    Unit::fp8(bytes(row, col), tables + table * Unit::kFp8TableBytes, to);
  }
};

/// Calls body(reader) with the reader of that kind. `tables` is scratch that lasts while the rows
/// are read.
template <class Unit, class Body>
void with_reader(ReaderKind kind, const PackedWeights& w, void* tables, std::int64_t first_col,
                 const Body& body) {
  auto* const made = static_cast<std::uint8_t*>(tables);
  const bool two_tables = w.block_k_shift == 5;
  switch (kind) {
    case ReaderKind::kStored:
      return body(NibbleReader<Unit, false, TableSource::kStored, true>{w});
    case ReaderKind::kShifted:
      if (two_tables) return body(NibbleReader<Unit, false, TableSource::kShifted, true>{w});
      return body(NibbleReader<Unit, false, TableSource::kShifted, false>{w});
    case ReaderKind::kMade:
      if (w.format == WeightFormat::kNf4) {
        return body(NibbleReader<Unit, true, TableSource::kMade, false>{w});
      }
      if (two_tables) return body(NibbleReader<Unit, false, TableSource::kMade, true>{w});
      return body(NibbleReader<Unit, false, TableSource::kMade, false>{w});
    case ReaderKind::kFp8:
      if (w.scale_columns == 1 && w.block_n == 1) {
        return body(Fp8Reader<Unit, true>{w, made, first_col});
      }
      return body(Fp8Reader<Unit, false>{w, made, first_col});
    case ReaderKind::kNone:
      break;
  }
}

}  // namespace
}  // namespace moegemm::cpu::simd
