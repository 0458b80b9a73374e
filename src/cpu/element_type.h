#pragma once

#include <bit>
#include <cstdint>

#include "moegemm/tensor.h"

/// The floating formats on the CPU: the type that stores each and its conversions, for code that
/// has no instruction for them. Conversions from float round to nearest, ties to even; a NaN stays
/// a NaN (quiet, with its sign). Each instruction set of simd/ has conversions of its own.
namespace moegemm {

struct BFloat16 {
  static constexpr DType kDtype = DType::kBFloat16;
  std::uint16_t bits;
};

struct Float16 {
  static constexpr DType kDtype = DType::kFloat16;
  std::uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

inline float to_float(Float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  // All three cases are computed and one is selected, so that loops over rows vectorise.
  // 112 = 127 - 15 is the difference of the exponent biases; adding it twice takes the exponent of
  // Inf and NaN from 31 to 255.
  const std::uint32_t normal = (magnitude << 13) + (112u << 23);
  const std::uint32_t special = normal + (112u << 23);
  // Zero and subnormals are multiples of 2^-24, exact in float.
  const std::uint32_t tiny =
      std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<int>(magnitude)) * 0x1p-24f);
  const std::uint32_t finite = magnitude < 0x0400u ? tiny : normal;
  return std::bit_cast<float>(sign | (magnitude >= 0x7c00u ? special : finite));
}

inline BFloat16 to_bfloat16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  // Both cases are computed and one is selected, so that loops over rows vectorise. Rounding could
  // carry a NaN's mantissa into Inf; truncation could leave it empty.
  const std::uint32_t quiet = (bits >> 16) | 0x0040u;
  const std::uint32_t tie_to_even = (bits >> 16) & 1u;
  const std::uint32_t rounded = (bits + 0x7fffu + tie_to_even) >> 16;
  const bool is_nan = static_cast<std::int32_t>(bits & 0x7fffffffu) > 0x7f800000;
  return {static_cast<std::uint16_t>(is_nan ? quiet : rounded)};
}

inline Float16 to_float16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {  // NaN: keep the top of the payload, set the quiet bit
    return {static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  }
  if (magnitude >= 0x477ff000u) {  // 65520, halfway between the largest finite value and 2^16
    return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  }
  if (magnitude < 0x38800000u) {
    // Below 2^-14 results are multiples of 2^-24. Adding 0.5, whose last bit is worth 2^-24, lets
    // the addition round; what lies above the bits of 0.5 is the result.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(
        sign | (std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0.5f)))};
  }
  const std::uint32_t tie_to_even = (magnitude >> 13) & 1u;
  const std::uint32_t rebased = magnitude - (112u << 23);
  return {static_cast<std::uint16_t>(sign | ((rebased + 0xfffu + tie_to_even) >> 13))};
}

/// Rounds to the type of `destination` and stores.
inline void store(float value, float& destination) { destination = value; }
inline void store(float value, BFloat16& destination) { destination = to_bfloat16(value); }
inline void store(float value, Float16& destination) { destination = to_float16(value); }

}  // namespace moegemm

namespace moegemm::cpu {

/// The types of all floating formats. What code does for every format it does for these.
template <typename... T>
struct ElementTypes {};
inline constexpr ElementTypes<BFloat16, Float16, float> kElementTypes;

template <typename T>
inline constexpr DType kDtypeOf = T::kDtype;
template <>
inline constexpr DType kDtypeOf<float> = DType::kFloat32;

template <typename Body, typename T, typename... Others>
decltype(auto) with_element_type_of(ElementTypes<T, Others...>, DType dtype, const Body& body) {
  if constexpr (sizeof...(Others) > 0) {
    if (dtype != kDtypeOf<T>) return with_element_type_of(ElementTypes<Others...>{}, dtype, body);
  }
  return body(static_cast<T*>(nullptr));
}

/// Calls body with a null pointer of the C++ type that stores `dtype`, a floating format.
template <typename Body>
decltype(auto) with_element_type(DType dtype, const Body& body) {
  return with_element_type_of(kElementTypes, dtype, body);
}

/// One element of a tensor whose dtype is only known at run time.
inline float read_float(const void* data, DType dtype, std::int64_t i) {
  return with_element_type(
      dtype, [&]<typename T>(T*) { return to_float(static_cast<const T*>(data)[i]); });
}

inline void write_float(void* data, DType dtype, std::int64_t i, float value) {
  with_element_type(dtype, [&]<typename T>(T*) { store(value, static_cast<T*>(data)[i]); });
}

}  // namespace moegemm::cpu
