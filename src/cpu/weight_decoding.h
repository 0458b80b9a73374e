#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <limits>

#include "cpu/element_type.h"
#include "moegemm/quantization.h"

/// Quantised weights one by one, in so many words: what the oracle reads, and what every faster
/// decoder must agree with. Each instruction set of simd/ has decoders of its own.
namespace moegemm::cpu {

/// e4m3fn: four bits of exponent (bias 7), three of mantissa, no infinities, NaN is 0x7f and 0xff.
inline float e4m3_value(std::uint8_t bits) {
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  float value = 0;
  if ((bits & 0x7f) == 0x7f) {
    value = std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    value = static_cast<float>(mantissa) * 0x1p-9f;
  } else {
    value = std::bit_cast<float>(static_cast<std::uint32_t>((exponent + 120) << 23) |
                                 static_cast<std::uint32_t>(mantissa << 20));
  }
  return (bits & 0x80) != 0 ? -value : value;
}

inline float e8m0_value(std::uint8_t bits) {
  if (bits == 255) return std::numeric_limits<float>::quiet_NaN();
  if (bits == 0) return 0x1p-127f;  // subnormal in fp32
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 23);
}

inline float scale_at(const void* scales, ScaleType type, std::int64_t i) {
  switch (type) {
    case ScaleType::kFloat32:
      return static_cast<const float*>(scales)[i];
    case ScaleType::kBFloat16:
      return to_float(static_cast<const BFloat16*>(scales)[i]);
    case ScaleType::kFloat16:
      return to_float(static_cast<const Float16*>(scales)[i]);
    case ScaleType::kE8m0:
      break;
  }
  return e8m0_value(static_cast<const std::uint8_t*>(scales)[i]);
}

/// Value number i of packed values.
inline float value_at(const void* packed, WeightFormat format, std::int64_t i) {
  const auto* bytes = static_cast<const std::uint8_t*>(packed);
  const auto low_first = [&] { return (bytes[i / 2] >> (i % 2 * 4)) & 15; };
  switch (format) {
    case WeightFormat::kPlain:
      break;
    case WeightFormat::kMxfp4:
      return kE2m1Values[low_first()];
    case WeightFormat::kFp8:
      return e4m3_value(bytes[i]);
    case WeightFormat::kInt4:
      return static_cast<float>(low_first() - 8);  // little-endian: int32s are bytes in order
    case WeightFormat::kNf4:
      return kNf4Values[(bytes[i / 2] >> (4 - i % 2 * 4)) & 15];
  }
  return 0;
}

/// An expert's quantised W.
struct QuantizedExpert {
  const Quantization& quantization;
  const void* values;
  const void* scales;
  std::int64_t n;
  std::int64_t k;

  QuantizedExpert(const Quantization& q, const void* all_values, const void* all_scales,
                  std::int64_t expert, std::int64_t rows, std::int64_t columns)
      : quantization(q),
        values(static_cast<const std::uint8_t*>(all_values) +
               expert * q.expert_bytes(rows, columns)),
        scales(static_cast<const std::uint8_t*>(all_scales) +
               expert * q.expert_scales(rows, columns) * scale_bytes(q.scale_type)),
        n(rows),
        k(columns) {}

  /// W_e[row, column] in fp32, before it is rounded to the dtype of X.
  float at(std::int64_t row, std::int64_t column) const {
    return value_at(values, quantization.format, row * k + column) *
           scale_at(scales, quantization.scale_type, quantization.scale_of(row, column, n, k));
  }
};

}  // namespace moegemm::cpu
