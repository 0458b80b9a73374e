#include "testing/numerics/floats.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace moegemm::testing {
namespace {

template <typename T>
void store(void* data, std::int64_t index, T value) {
  std::memcpy(static_cast<char*>(data) + index * sizeof(T), &value, sizeof(T));
}

/// The 16 bits nearest to `value`.
std::uint32_t nearest_bits(const Precision& precision, float value) {
  const std::uint32_t sign = std::signbit(value) ? 0x8000 : 0;
  const std::uint32_t quiet = 1u << (precision.fraction_bits() - 1);
  if (std::isnan(value)) return sign | precision.infinity() | quiet;
  std::uint32_t bits = std::bit_cast<std::uint32_t>(std::fabs(value));
  const std::uint32_t exponents_apart = 127 - precision.bias();
  if (bits < (exponents_apart + 1) << 23) {  // subnormal: multiples of the smallest one
    const int steps_per_one = precision.fraction_bits() - precision.smallest_exponent();
    return sign |
           static_cast<std::uint32_t>(std::nearbyint(std::ldexp(std::fabs(value), steps_per_one)));
  }
  const int dropped = 24 - precision.significand_bits;
  bits += (1u << (dropped - 1)) - 1 + ((bits >> dropped) & 1);
  return sign | std::min((bits - (exponents_apart << 23)) >> dropped, precision.infinity());
}

}  // namespace

void refuse_format(DType dtype) {
  throw std::invalid_argument(std::string("no arithmetic of the tests for ") + to_string(dtype));
}

void encode(DType dtype, void* data, std::int64_t index, float value) {
  const Precision& precision = precision_of(dtype);
  if (size_bytes(dtype) == 4) return store(data, index, value);
  store(data, index, static_cast<std::uint16_t>(nearest_bits(precision, value)));
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
  const int scale = std::max(exponent, precision.smallest_exponent()) - precision.significand_bits;
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
