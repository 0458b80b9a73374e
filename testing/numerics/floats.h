#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "moegemm/tensor.h"

/// Floating-point formats of the tests and the program, written apart from the library's own
/// conversions so that a mistake there cannot hide here.
namespace moegemm::testing {

template <typename T>
T load_element(const void* data, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * sizeof(T), sizeof(T));
  return value;
}

/// Formats of IEEE's kind: a sign, an exponent, a fraction, the largest exponent for Inf and NaN.
struct Precision {
  DType value;
  int significand_bits;  // with the leading one, which is not stored
  constexpr int fraction_bits() const { return significand_bits - 1; }
  constexpr int bias() const {
    const auto exponent_bits = 8 * static_cast<int>(size_bytes(value)) - significand_bits;
    return (1 << (exponent_bits - 1)) - 1;
  }
  constexpr int smallest_exponent() const { return 1 - bias(); }  // of a normal number
  constexpr std::uint32_t infinity() const { return (2u * bias() + 1) << fraction_bits(); }
};
inline constexpr Precision kPrecisions[] = {
    {DType::kBFloat16, 8},
    {DType::kFloat16, 11},
    {DType::kFloat32, 24},
};
/// A format that is not in the table is no fp32 by default.
[[noreturn]] void refuse_format(DType dtype);
inline const Precision& precision_of(DType dtype) {
  for (const Precision& precision : kPrecisions) {
    if (precision.value == dtype) return precision;
  }
  refuse_format(dtype);
}

/// The element's value; exact, since every format is a subset of fp32. Here, since tests decode
/// every element of every operand.
inline float decode(DType dtype, const void* data, std::int64_t index) {
  const Precision& precision = precision_of(dtype);
  if (size_bytes(dtype) == 4) return load_element<float>(data, index);
  const std::uint32_t bits = load_element<std::uint16_t>(data, index);
  const std::uint32_t magnitude = bits & 0x7FFF;
  // The digits as those of an fp32 number, whose exponent is then too small by a constant.
  const std::uint32_t digits = magnitude << (24 - precision.significand_bits);
  const float factor = std::bit_cast<float>((254u - precision.bias()) << 23);  // 2^(127 - bias)
  const float value = magnitude < precision.infinity() ? std::bit_cast<float>(digits) * factor
                                                       : std::bit_cast<float>(digits | 0x7F800000);
  return (bits & 0x8000) != 0 ? -value : value;
}
/// Rounds to nearest, ties to even, and stores.
void encode(DType dtype, void* data, std::int64_t index, float value);
/// The value that is stored when this one is.
float round_to(DType dtype, float value);

/// Half the distance between neighbours of `dtype` around this magnitude: the most that one
/// rounding to nearest can be off.
double half_ulp(DType dtype, double magnitude);
/// Relative error of one rounding to nearest of a normal number: 2^-24, 2^-11, 2^-8.
double unit_roundoff(DType dtype);
/// The smallest number that has all its digits.
double least_normal(DType dtype);
/// Whether every bit of the element is set: the NaN that outputs are filled with beforehand.
inline bool is_poison(DType dtype, const void* data, std::int64_t index) {
  return size_bytes(dtype) == 2 ? load_element<std::uint16_t>(data, index) == 0xFFFF
                                : load_element<std::uint32_t>(data, index) == 0xFFFFFFFF;
}

inline constexpr std::uint8_t kPoisonByte = 0xFF;
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

std::int64_t decode_index(DType dtype, const void* data, std::int64_t index);
void encode_index(DType dtype, void* data, std::int64_t index, std::int64_t value);

}  // namespace moegemm::testing
