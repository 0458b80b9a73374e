#include "testing/numerics/floats.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace moegemm::testing {
namespace {

template <typename T>
void store(void* data, std::int64_t index, T value) {
  std::memcpy(static_cast<char*>(data) + index * sizeof(T), &value, sizeof(T));
}

float half_to_float(std::uint16_t bits) {
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  const int exponent = (bits >> 10) & 0x1F;
  const int fraction = bits & 0x3FF;
  if (exponent == 0x1F) return fraction != 0 ? kNan : sign * kInf;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
}

std::uint16_t float_to_half(float value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7E00;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return sign | 0x7C00;  // the tie between 65504 and 2^16 rounds up
  if (magnitude < std::ldexp(1.0f, -14)) {          // subnormal: multiples of 2^-24
    return sign | static_cast<std::uint16_t>(std::nearbyint(std::ldexp(magnitude, 24)));
  }
  std::uint32_t bits = std::bit_cast<std::uint32_t>(magnitude);
  bits += 0xFFF + ((bits >> 13) & 1);
  return sign | static_cast<std::uint16_t>((bits - (112u << 23)) >> 13);
}

std::uint16_t float_to_bfloat(float value) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  bits += 0x7FFF + ((bits >> 16) & 1);
  return static_cast<std::uint16_t>(bits >> 16);
}

struct Precision {
  DType value;
  int significand_bits;   // with the leading one
  int smallest_exponent;  // of a normal number
};
constexpr Precision kPrecisions[] = {
    {DType::kBFloat16, 8, -126},
    {DType::kFloat16, 11, -14},
    {DType::kFloat32, 24, -126},
};

const Precision& precision_of(DType dtype) {
  for (const Precision& precision : kPrecisions) {
    if (precision.value == dtype) return precision;
  }
  refuse_format(dtype);
}

}  // namespace

void refuse_format(DType dtype) {
  throw std::invalid_argument(std::string("no arithmetic of the tests for ") + to_string(dtype));
}

float decode_half(std::uint16_t bits) {
  static const std::vector<float> table = [] {
    std::vector<float> values(65536);
    for (int i = 0; i < 65536; ++i) values[i] = half_to_float(static_cast<std::uint16_t>(i));
    return values;
  }();
  return table[bits];
}

void encode(DType dtype, void* data, std::int64_t index, float value) {
  switch (dtype) {
    case DType::kBFloat16:
      return store(data, index, float_to_bfloat(value));
    case DType::kFloat16:
      return store(data, index, float_to_half(value));
    case DType::kFloat32:
      return store(data, index, value);
    default:
      refuse_format(dtype);
  }
}

float round_to(DType dtype, float value) {
  encode(dtype, &value, 0, value);
  return decode(dtype, &value, 0);
}

double unit_roundoff(DType dtype) { return std::ldexp(1.0, -precision_of(dtype).significand_bits); }

double half_ulp(DType dtype, double magnitude) {
  const Precision& precision = precision_of(dtype);
  const int exponent =
      static_cast<int>((std::bit_cast<std::uint64_t>(magnitude) >> 52) & 0x7FF) - 1023;
  const int scale = std::max(exponent, precision.smallest_exponent) - precision.significand_bits;
  return std::bit_cast<double>(static_cast<std::uint64_t>(scale + 1023) << 52);  // 2^scale
}

double least_normal(DType dtype) { return half_ulp(dtype, 0.0) / unit_roundoff(dtype); }

std::int64_t decode_index(DType dtype, const void* data, std::int64_t index) {
  return dtype == DType::kInt64 ? load_element<std::int64_t>(data, index)
                                : load_element<std::int32_t>(data, index);
}

void encode_index(DType dtype, void* data, std::int64_t index, std::int64_t value) {
  if (dtype == DType::kInt64) {
    store(data, index, value);
  } else {
    store(data, index, static_cast<std::int32_t>(value));
  }
}

}  // namespace moegemm::testing
