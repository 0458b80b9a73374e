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

inline float e4m3_to_float(std::uint8_t bits) {
  // As fp16 the same bits are 2^-8 times as much.
  const auto half = static_cast<std::uint16_t>((bits & 0x80u) << 8 | (bits & 0x7fu) << 7);
  return (bits & 0x7fu) == 0x7fu ? bits_to_float(0x7fc00000u) : half_to_float(half) * 256.0f;
}

inline float scale_value(const PackedWeights& w, std::int64_t i) {
  switch (w.scale_type) {
    case ScaleType::kFloat32:
      return static_cast<const float*>(w.scales)[i];
    case ScaleType::kBFloat16:
      return bits_to_float(
          static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(w.scales)[i]) << 16);
    case ScaleType::kFloat16:
      return half_to_float(static_cast<const std::uint16_t*>(w.scales)[i]);
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

/// The values of nibbles at `place` and on, where `place` counts from `values`, one by one.
template <class T, bool HighFirst>
void decode_nibbles(const std::uint8_t* values, std::int64_t place, std::int64_t count,
                    const T* table, T* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    const bool high = ((place + i) % 2 != 0) != HighFirst;
    out[i] = table[(values[(place + i) / 2] >> (high ? 4 : 0)) & 15];
  }
}

/// The nibbles of a group that is whole, where `bytes` are. What lies `ahead_bytes` after them is
/// fetched meanwhile: it is decoded next, after a product that leaves the memory idle.
template <class Isa, class T, bool HighFirst, bool Made, class Table>
[[gnu::always_inline]] inline void decode_group(const std::uint8_t* bytes, std::int64_t block,
                                                const Table& table, std::int64_t ahead_bytes,
                                                T* out) {
  for (std::int64_t i = 0; i < block; i += kNibbleStep, bytes += kNibbleStep / 2) {
    Isa::prefetch_l1(bytes + ahead_bytes);
    Isa::template look_up_nibbles<HighFirst, Made>(bytes, table, out + i);
  }
}

/// A row's columns [col, col + cols) of a format with nibbles, group by group. Made: tables come
/// of scales, else they were made for every scale.
template <class Isa, class T, bool HighFirst, bool Made>
void decode_nibble_row(const PackedWeights& w, std::int64_t row, std::int64_t col,
                       std::int64_t cols, std::int64_t ahead_bytes, T* out) {
  const std::int64_t first_place = row * w.k;
  const std::int64_t first_scale = w.flat_blocks ? 0 : row * w.scale_columns;
  const std::int64_t from = w.flat_blocks ? first_place : 0;  // where blocks are counted from
  const std::int64_t block = std::int64_t{1} << w.block_k_shift;
  const std::int64_t last = col + cols;
  const auto stored_table = [&](std::int64_t scale) {
    return static_cast<const T*>(w.tables) + 16 * static_cast<const std::uint8_t*>(w.scales)[scale];
  };
  for (std::int64_t c = col; c < last;) {
    std::int64_t scale = first_scale + ((from + c) >> w.block_k_shift);
    const std::int64_t end_of_group = (((from + c) >> w.block_k_shift) + 1) * block - from;
    // Whole groups from here on.
    if (end_of_group - c == block && end_of_group <= last && (first_place + c) % 2 == 0) {
      const std::uint8_t* bytes = w.values + (first_place + c) / 2;
      for (; c + block <= last; c += block, ++scale, bytes += block / 2) {
        T* const target = out + c - col;
        if constexpr (Made) {
          decode_group<Isa, T, HighFirst, true>(
              bytes, block, Isa::template make_table<T>(w.table_values, scale_value(w, scale)),
              ahead_bytes, target);
        } else {
          decode_group<Isa, T, HighFirst, false>(bytes, block, Isa::load_table(stored_table(scale)),
                                                 ahead_bytes, target);
        }
      }
      continue;
    }
    const std::int64_t end = end_of_group < last ? end_of_group : last;
    alignas(64) T table[16];
    if constexpr (Made) fill_table<Isa, T>(w.table_values, scale_value(w, scale), table);
    decode_nibbles<T, HighFirst>(w.values, first_place + c, end - c,
                                 Made ? table : stored_table(scale), out + c - col);
    c = end;
  }
}

/// e4m3 by arithmetic.
template <class Isa, class T>
void decode_fp8_span(const std::uint8_t* bytes, std::int64_t count, float scale, T* out) {
  const typename Isa::Vec factor = Isa::broadcast(scale);
  std::int64_t i = 0;
  for (; i + Isa::kLanes <= count; i += Isa::kLanes) {
    Isa::store_exact(out + i, Isa::mul(Isa::load_e4m3(bytes + i), factor));
  }
  if (i == count) return;
  std::uint8_t rest[Isa::kLanes] = {};
  T decoded[Isa::kLanes];
  for (std::int64_t j = i; j < count; ++j) rest[j - i] = bytes[j];
  Isa::store_exact(decoded, Isa::mul(Isa::load_e4m3(rest), factor));
  for (std::int64_t j = i; j < count; ++j) out[j] = decoded[j - i];
}

/// e4m3 to bf16 by a table, for scales that take no value out of bf16's normal numbers.
template <class Isa>
void fill_fp8_table(float scale, Bf16* table) {
  // (1 + m / 8) 2^-7, to which the exponent field is added, and m 2^-9.
  static constexpr float kValues[16] = {
      0x1.0p-7f, 0x1.2p-7f, 0x1.4p-7f, 0x1.6p-7f, 0x1.8p-7f, 0x1.ap-7f, 0x1.cp-7f, 0x1.ep-7f,
      0.0f,      0x1p-9f,   0x2p-9f,   0x3p-9f,   0x4p-9f,   0x5p-9f,   0x6p-9f,   0x7p-9f};
  fill_table<Isa, Bf16>(kValues, scale, table);
}

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
    const float scale = scale_value(w, first_scale + (whole_row ? 0 : group));
    if constexpr (std::is_same_v<T, Bf16> && Isa::kLooksUpFp8) {
      if (fits_fp8_table(scale)) {
        alignas(64) Bf16 values[16];
        fill_fp8_table<Isa>(scale, values);
        const typename Isa::Fp8Table table(values);
        const std::int64_t whole = (end - c) / kFp8Step * kFp8Step;
        for (std::int64_t r = 0; r < rows; ++r) {
          const std::uint8_t* const bytes = w.values + (row + r) * w.k + c;
          T* const target = out + r * stride + c - col;
          for (std::int64_t i = 0; i < whole; i += kFp8Step) {
            Isa::prefetch_l1(bytes + i + ahead_bytes);
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

/// W_e[row + r, col + c] into out[r * stride + c].
template <class Isa, class T>
void decode_block(const PackedWeights& w, std::int64_t row, std::int64_t rows, std::int64_t col,
                  std::int64_t cols, T* out, std::int64_t stride) {
  if (w.format != WeightFormat::kFp8) {
    const std::int64_t ahead_bytes = rows * w.k / 2;
    const auto decode_row = w.tables != nullptr ? decode_nibble_row<Isa, T, false, false>
                            : w.format == WeightFormat::kNf4
                                ? decode_nibble_row<Isa, T, true, true>
                                : decode_nibble_row<Isa, T, false, true>;
    for (std::int64_t r = 0; r < rows; ++r) {
      decode_row(w, row + r, col, cols, ahead_bytes, out + r * stride);
    }
    return;
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
