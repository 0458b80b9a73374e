#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/simd/kernel_table.h"
#include "cpu/simd/kernels/element.h"

/// Quantised weights become elements of T, a block of rows and columns at a time, in scratch that a
/// product reads next: value * scale in fp32, rounded once.
///
/// Nibbles are places in a table of 16 elements, which holds the rounded products with the scale of
/// the group: one lookup for each value, whatever the format. e4m3 goes through such a table too
/// where T is bf16: a power of two does not change how a product is rounded, so that the table
/// holds eight mantissas (and the eight denormals), and the exponent is added to the bits.
namespace moegemm::cpu::simd {
namespace {

/// Packed bytes that a vector step of a lookup takes: 32 nibbles, or as many values of fp8.
constexpr std::int64_t kNibbleStep = 32;
constexpr std::int64_t kFp8Step = 32;

inline float bits_to_float(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float half_to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  if (magnitude < 0x400u) {  // zero and denormals: multiples of 2^-24
    const float tiny = static_cast<float>(static_cast<int>(magnitude)) * 0x1p-24f;
    return sign != 0 ? -tiny : tiny;
  }
  // 112 is the difference of the exponent biases; twice that takes Inf and NaN from 31 to 255.
  const std::uint32_t bias = magnitude >= 0x7c00u ? 224u << 23 : 112u << 23;
  return bits_to_float(sign | ((magnitude << 13) + bias));
}

template <class Isa>
float scale_value(const PackedWeights& w, std::int64_t i) {
  switch (w.scale_type) {
    case ScaleType::kFloat32:
      return static_cast<const float*>(w.scales)[i];
    case ScaleType::kBFloat16:
      return bits_to_float(
          static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(w.scales)[i]) << 16);
    case ScaleType::kFloat16:
      return Isa::widen_half(static_cast<const std::uint16_t*>(w.scales)[i]);
    case ScaleType::kE8m0:
      break;
  }
  const std::uint32_t bits = static_cast<const std::uint8_t*>(w.scales)[i];
  return bits_to_float(bits == 0 ? 0x00400000u : bits == 255 ? 0x7fc00000u : bits << 23);
}

/// round(value * scale) of sixteen values.
template <class Isa, class T>
[[gnu::always_inline]] inline void fill_table(const float* values, float scale, T* table) {
  const typename Isa::Vec factor = Isa::broadcast(scale);
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < 16; i += Isa::kLanes) {
    Isa::store_exact(table + i, Isa::mul(Isa::load(values + i), factor));
  }
}

template <class Isa>
[[gnu::always_inline]] inline void fetch_span(const std::uint8_t* bytes, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += 64) Isa::prefetch_l2(bytes + i);
}

/// The values of nibbles at `place` and on, where `place` counts from `values`, one by one.
template <class T, bool HighFirst>
void decode_nibbles(const std::uint8_t* values, std::int64_t place, std::int64_t count,
                    const T* table, T* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    const bool high = ((place + i) % 2 != 0) != HighFirst;
    out[i] = table[(values[(place + i) / 2] >> (high ? 4 : 0)) & 15];
  }
}

/// Where the table of a group comes from.
enum class TableSource {
  kStored,   ///< there is one for each scale of e8m0
  kShifted,  ///< there is one for each scale of bf16 but for its eight upper bits
  kMade,     ///< of values and scale
};

/// Positive, and far from where products would be denormal or infinite: 2^-99 to 2^99.
constexpr std::uint16_t kLeastShift = 0x0e00;
constexpr std::uint16_t kShiftRange = 0x6300;
inline bool shifts_table(std::uint16_t scale_bits) {
  return std::uint32_t{scale_bits} - kLeastShift < kShiftRange;
}

template <class Isa, class T, TableSource Source>
[[gnu::always_inline]] inline auto table_of_group(const PackedWeights& w, std::int64_t scale) {
  if constexpr (Source == TableSource::kStored) {
    const std::int64_t exponent = static_cast<const std::uint8_t*>(w.scales)[scale];
    return Isa::load_table(static_cast<const T*>(w.tables) + kTableElems * exponent);
  } else if constexpr (Source == TableSource::kShifted) {
    const std::uint16_t* const bits = static_cast<const std::uint16_t*>(w.scales) + scale;
    if (shifts_table(*bits)) {
      return Isa::shift_table(static_cast<const T*>(w.tables) + kTableElems * (*bits & 0xff), bits);
    }
    return Isa::template make_table<T>(w.table_values, bits_to_float(std::uint32_t{*bits} << 16));
  } else {
    return Isa::template make_table<T>(w.table_values, scale_value<Isa>(w, scale));
  }
}

/// A run of whole groups in each of some rows.
struct GroupRun {
  const std::uint8_t* bytes;  // of the first row
  std::int64_t row_bytes;
  std::int64_t scale;  // number of the first row's first
  std::int64_t row_scales;
  std::int64_t rows;
  std::int64_t groups;  // of a row
};

/// Block: values of a group, or 0 if w alone knows. What lies `ahead_bytes` after a row is fetched
/// meanwhile: it is decoded next, after a product that leaves the memory idle.
template <class Isa, class T, bool HighFirst, TableSource Source, std::int64_t Block>
void decode_groups(const PackedWeights& packed, const GroupRun& run, std::int64_t ahead_bytes,
                   T* out, std::int64_t stride) {
  const PackedWeights w = packed;  // which `out` cannot reach
  const std::int64_t block = Block != 0 ? Block : std::int64_t{1} << w.block_k_shift;
  for (std::int64_t r = 0; r < run.rows; ++r) {
    const std::uint8_t* bytes = run.bytes + r * run.row_bytes;
    std::int64_t scale = run.scale + r * run.row_scales;
    T* target = out + r * stride;
    fetch_span<Isa>(bytes + ahead_bytes, run.groups * block / 2);
    for (const std::int64_t end = scale + run.groups; scale < end; ++scale) {
      const auto table = table_of_group<Isa, T, Source>(w, scale);
#pragma GCC unroll 2
      for (std::int64_t i = 0; i < block; i += kNibbleStep) {
        Isa::template look_up_nibbles<HighFirst>(bytes, table, target);
        bytes += kNibbleStep / 2;
        target += kNibbleStep;
      }
    }
  }
}

template <class Isa, class T, bool HighFirst, TableSource Source>
void decode_run(const PackedWeights& w, const GroupRun& run, std::int64_t ahead_bytes, T* out,
                std::int64_t stride) {
  const auto decode = w.block_k_shift == 5   ? decode_groups<Isa, T, HighFirst, Source, 32>
                      : w.block_k_shift == 6 ? decode_groups<Isa, T, HighFirst, Source, 64>
                                             : decode_groups<Isa, T, HighFirst, Source, 0>;
  decode(w, run, ahead_bytes, out, stride);
}

/// A row's columns [col, col + cols), where groups may begin and end anywhere.
template <class Isa, class T, bool HighFirst, TableSource Source>
void decode_nibble_row(const PackedWeights& w, std::int64_t row, std::int64_t col,
                       std::int64_t cols, std::int64_t ahead_bytes, T* out) {
  const std::int64_t first_place = row * w.k;
  const std::int64_t first_scale = w.flat_blocks ? 0 : row * w.scale_columns;
  const std::int64_t from = w.flat_blocks ? first_place : 0;  // where blocks are counted from
  const std::int64_t block = std::int64_t{1} << w.block_k_shift;
  const std::int64_t last = col + cols;
  for (std::int64_t c = col; c < last;) {
    const std::int64_t scale = first_scale + ((from + c) >> w.block_k_shift);
    const std::int64_t end_of_group = (((from + c) >> w.block_k_shift) + 1) * block - from;
    if (end_of_group - c == block && end_of_group <= last && (first_place + c) % 2 == 0) {
      const std::int64_t groups = (last - c) >> w.block_k_shift;
      const GroupRun run = {w.values + (first_place + c) / 2, 0, scale, 0, 1, groups};
      decode_run<Isa, T, HighFirst, Source>(w, run, ahead_bytes, out + c - col, 0);
      c += groups * block;
      continue;
    }
    const std::int64_t end = end_of_group < last ? end_of_group : last;
    alignas(64) T made[16];
    const T* table = made;
    if constexpr (Source == TableSource::kStored) {
      table = static_cast<const T*>(w.tables) +
              kTableElems * static_cast<const std::uint8_t*>(w.scales)[scale];
    } else {
      fill_table<Isa, T>(w.table_values, scale_value<Isa>(w, scale), made);
    }
    decode_nibbles<T, HighFirst>(w.values, first_place + c, end - c, table, out + c - col);
    c = end;
  }
}

/// Columns [col, col + cols) of some rows of a format with nibbles.
template <class Isa, class T, bool HighFirst, TableSource Source>
void decode_nibble_rows(const PackedWeights& w, std::int64_t row, std::int64_t rows,
                        std::int64_t col, std::int64_t cols, T* out, std::int64_t stride) {
  const std::int64_t in_group = (std::int64_t{1} << w.block_k_shift) - 1;
  const std::int64_t ahead_bytes = rows * w.k / 2;
  if (((w.k | col | cols) & in_group) == 0) {
    const std::int64_t row_scales = w.k >> w.block_k_shift;
    const GroupRun run = {w.values + (row * w.k + col) / 2,
                          w.k / 2,
                          row * row_scales + (col >> w.block_k_shift),
                          row_scales,
                          rows,
                          cols >> w.block_k_shift};
    return decode_run<Isa, T, HighFirst, Source>(w, run, ahead_bytes, out, stride);
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    decode_nibble_row<Isa, T, HighFirst, Source>(w, row + r, col, cols, ahead_bytes,
                                                 out + r * stride);
  }
}

/// e4m3 by arithmetic.
template <class Isa, class T>
void decode_fp8_span(const std::uint8_t* bytes, std::int64_t count, float scale, T* out) {
  const typename Isa::Vec factor = Isa::broadcast(scale);
  constexpr std::int64_t kStep = 2 * Isa::kLanes;
  const auto decode_step = [=](const std::uint8_t* from, T* to) __attribute__((always_inline)) {
    typename Isa::Vec values[2];
    Isa::load_e4m3(from, values);
    Isa::store_exact(to, Isa::mul(values[0], factor));
    Isa::store_exact(to + Isa::kLanes, Isa::mul(values[1], factor));
  };
  std::int64_t i = 0;
  for (; i + kStep <= count; i += kStep) decode_step(bytes + i, out + i);
  if (i == count) return;
  std::uint8_t rest[kStep] = {};
  T decoded[kStep];
  for (std::int64_t j = i; j < count; ++j) rest[j - i] = bytes[j];
  decode_step(rest, decoded);
  for (std::int64_t j = i; j < count; ++j) out[j] = decoded[j - i];
}

/// (1 + m / 8) 2^-7, to which the exponent field is added, and m 2^-9: times a scale, the table of
/// e4m3 to bf16.
constexpr float kFp8Values[16] = {0x1.0p-7f, 0x1.2p-7f, 0x1.4p-7f, 0x1.6p-7f, 0x1.8p-7f, 0x1.ap-7f,
                                  0x1.cp-7f, 0x1.ep-7f, 0.0f,      0x1p-9f,   0x2p-9f,   0x3p-9f,
                                  0x4p-9f,   0x5p-9f,   0x6p-9f,   0x7p-9f};

/// Scales that take no value out of bf16's normal numbers.
inline bool fits_fp8_table(float scale) {
  const float magnitude = scale < 0 ? -scale : scale;
  return magnitude > 0x1p-100f && magnitude < 0x1p100f;
}

/// Rows that share their scales, column block after column block.
template <class Isa, class T>
void decode_fp8_rows(const PackedWeights& w, std::int64_t row, std::int64_t rows, std::int64_t col,
                     std::int64_t cols, std::int64_t ahead_bytes, T* out, std::int64_t stride) {
  const std::int64_t first_scale = row / w.block_n * w.scale_columns;
  for (std::int64_t c = col; c < col + cols;) {
    const std::int64_t group = c >> w.block_k_shift;
    const bool whole_row = w.scale_columns == 1;
    const std::int64_t end_of_group = whole_row ? w.k : (group + 1) << w.block_k_shift;
    const std::int64_t end = end_of_group < col + cols ? end_of_group : col + cols;
    const float scale = scale_value<Isa>(w, first_scale + (whole_row ? 0 : group));
    if constexpr (std::is_same_v<T, Bf16> && Isa::kLooksUpFp8) {
      if (fits_fp8_table(scale)) {
        const typename Isa::Fp8Table table(Isa::template make_table<Bf16>(kFp8Values, scale));
        const std::int64_t whole = (end - c) / kFp8Step * kFp8Step;
        for (std::int64_t r = 0; r < rows; ++r) {
          const std::uint8_t* const bytes = w.values + (row + r) * w.k + c;
          T* const target = out + r * stride + c - col;
          fetch_span<Isa>(bytes + ahead_bytes, whole);
          for (std::int64_t i = 0; i < whole; i += kFp8Step) {
            Isa::look_up_fp8(bytes + i, table, target + i);
          }
          if (whole < end - c) {
            decode_fp8_span<Isa, T>(bytes + whole, end - c - whole, scale, target + whole);
          }
        }
        c = end;
        continue;
      }
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      decode_fp8_span<Isa, T>(w.values + (row + r) * w.k + c, end - c, scale,
                              out + r * stride + c - col);
    }
    c = end;
  }
}

template <class Isa, class T>
auto nibble_decoder(const PackedWeights& w) {
  if (w.format == WeightFormat::kMxfp4) {
    return decode_nibble_rows<Isa, T, false, TableSource::kStored>;
  }
  if (w.format == WeightFormat::kNf4) return decode_nibble_rows<Isa, T, true, TableSource::kMade>;
  if constexpr (std::is_same_v<T, Bf16> && Isa::kShiftsTables) {
    if (w.tables != nullptr) return decode_nibble_rows<Isa, T, false, TableSource::kShifted>;
  }
  return decode_nibble_rows<Isa, T, false, TableSource::kMade>;
}

/// W_e[row + r, col + c] into out[r * stride + c].
template <class Isa, class T>
void decode_block(const PackedWeights& w, std::int64_t row, std::int64_t rows, std::int64_t col,
                  std::int64_t cols, T* out, std::int64_t stride) {
  if (w.format != WeightFormat::kFp8) {
    return nibble_decoder<Isa, T>(w)(w, row, rows, col, cols, out, stride);
  }
  for (std::int64_t r = 0; r < rows;) {
    const std::int64_t end_of_run = (row + r) / w.block_n * w.block_n + w.block_n - row;
    const std::int64_t end = end_of_run < rows ? end_of_run : rows;
    decode_fp8_rows<Isa, T>(w, row + r, end - r, col, cols, rows * w.k, out + r * stride, stride);
    r = end;
  }
}

/// The same for callers that know neither type.
template <class Isa, class T>
void decode_task(const PackedWeights& w, std::int64_t row, std::int64_t rows, void* out) {
  decode_block<Isa, T>(w, row, rows, 0, w.k, static_cast<T*>(out), w.k);
}

}  // namespace
}  // namespace moegemm::cpu::simd
