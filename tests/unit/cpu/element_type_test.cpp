#include "cpu/element_type.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace moegemm {
namespace {

std::uint16_t pattern(int bits) { return static_cast<std::uint16_t>(bits); }

/// The value of a 16-bit pattern by the definition of the format.
double value_by_definition(int bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  }
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias)
                       : sign * std::ldexp(1.0 + fraction, exponent - bias);
}

TEST(BFloat16, EveryPatternHasTheValueOfItsDefinitionAndComesBack) {
  for (int bits = 0; bits <= 0xffff; ++bits) {
    const float value = to_float(BFloat16{pattern(bits)});
    const double expected = value_by_definition(bits, 8, 7);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_TRUE(std::isnan(to_float(to_bfloat16(value)))) << bits;
      ASSERT_EQ(to_bfloat16(value).bits & 0x8000, bits & 0x8000) << bits;
      continue;
    }
    ASSERT_EQ(value, expected) << bits;
    ASSERT_EQ(std::signbit(value), std::signbit(expected)) << bits;
    ASSERT_EQ(to_bfloat16(value).bits, bits);
  }
}

TEST(Float16, EveryPatternHasTheValueOfItsDefinitionAndComesBack) {
  for (int bits = 0; bits <= 0xffff; ++bits) {
    const float value = to_float(Float16{pattern(bits)});
    const double expected = value_by_definition(bits, 5, 10);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_TRUE(std::isnan(to_float(to_float16(value)))) << bits;
      ASSERT_EQ(to_float16(value).bits & 0x8000, bits & 0x8000) << bits;
      continue;
    }
    ASSERT_EQ(value, expected) << bits;
    ASSERT_EQ(std::signbit(value), std::signbit(expected)) << bits;
    ASSERT_EQ(to_float16(value).bits, bits);
  }
}

/// Between each two neighbouring finite values: just below the middle goes down, just above goes
/// up, the middle goes to the even pattern. For the step to Inf the middle goes to Inf.
template <typename Half, typename Convert>
void expect_nearest_even(int infinity, Convert convert) {
  for (int bits = 0; bits < infinity; ++bits) {
    const double low = to_float(Half{pattern(bits)});
    const double step = bits == 0 ? static_cast<double>(to_float(Half{pattern(1)}))
                                  : low - to_float(Half{pattern(bits - 1)});
    const double high =
        bits + 1 == infinity ? low + step : static_cast<double>(to_float(Half{pattern(bits + 1)}));
    const float middle = static_cast<float>((low + high) / 2);
    // The smallest bf16 step has no representable middle in float beyond its subnormals; skip only
    // where the middle is not exact.
    if (middle != (low + high) / 2) continue;
    const int even = (bits & 1) == 0 ? bits : bits + 1;
    ASSERT_EQ(convert(middle).bits, even) << bits;
    ASSERT_EQ(convert(std::nextafter(middle, 0.0f)).bits, bits) << bits;
    ASSERT_EQ(convert(std::nextafter(middle, std::numeric_limits<float>::infinity())).bits,
              bits + 1)
        << bits;
    ASSERT_EQ(convert(-middle).bits, even | 0x8000) << bits;
  }
}

TEST(BFloat16, RoundsToNearestEvenBetweenAllNeighbours) {
  expect_nearest_even<BFloat16>(0x7f80, to_bfloat16);
}

TEST(Float16, RoundsToNearestEvenBetweenAllNeighbours) {
  expect_nearest_even<Float16>(0x7c00, to_float16);
}

TEST(BFloat16, NaNWithAPayloadInTheLowBitsStaysNaN) {
  EXPECT_TRUE(std::isnan(to_float(to_bfloat16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(to_float(to_bfloat16(std::bit_cast<float>(0xffffffffu)))));
}

TEST(Float16, NaNWithAPayloadInTheLowBitsStaysNaN) {
  EXPECT_TRUE(std::isnan(to_float(to_float16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(to_float(to_float16(std::bit_cast<float>(0xffffffffu)))));
}

TEST(Float16, LargeFloatsBecomeInfinityAndTinyOnesZero) {
  EXPECT_EQ(to_float16(std::numeric_limits<float>::max()).bits, 0x7c00);
  EXPECT_EQ(to_float16(-65520.0f).bits, 0xfc00);
  EXPECT_EQ(to_float16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(to_float16(std::numeric_limits<float>::denorm_min()).bits, 0x0000);
  EXPECT_EQ(to_float16(-0.0f).bits, 0x8000);
}

}  // namespace
}  // namespace moegemm
