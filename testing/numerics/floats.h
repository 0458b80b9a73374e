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

float decode_half(std::uint16_t bits);
/// A format that this file does not know is no fp32 by default.
[[noreturn]] void refuse_format(DType dtype);

/// The element's value; exact, since every format is a subset of fp32. Here, since tests decode
/// every element of every operand.
inline float decode(DType dtype, const void* data, std::int64_t index) {
  switch (dtype) {
    case DType::kBFloat16:
      return std::bit_cast<float>(std::uint32_t{load_element<std::uint16_t>(data, index)} << 16);
    case DType::kFloat16:
      return decode_half(load_element<std::uint16_t>(data, index));
    case DType::kFloat32:
      return load_element<float>(data, index);
    default:
      refuse_format(dtype);
  }
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
