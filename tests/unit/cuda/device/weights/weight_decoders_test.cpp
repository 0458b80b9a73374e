#include "cuda/device/weights/weight_decoders.cuh"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

/// Every code of a format under many scales, as the host runs the kernels' maths, against value
/// times scale in fp32, rounded once.
namespace moegemm::cuda {
namespace {

/// To nearest even, by arithmetic alone: `digits` significand bits, exponents from `least` on.
float rounded(float value, int digits, int least, float largest) {
  if (value == 0 || !std::isfinite(value)) return value;
  int exponent;
  std::frexp(value, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - digits, least - digits + 1));
  const double result = std::nearbyint(value / unit) * unit;
  return std::abs(result) > largest ? std::copysign(INFINITY, value) : static_cast<float>(result);
}

template <typename Element>
float round_element(float value) {
  if constexpr (std::is_same_v<Element, __half>) return rounded(value, 11, -14, 65504.0f);
  return rounded(value, 8, -126, std::bit_cast<float>(0x7f7f0000u));
}

/// The same number, zeros by sign; a NaN is a NaN.
bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) ||
         std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

float e2m1_value(int code) {
  constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return code < 8 ? kMagnitudes[code] : -kMagnitudes[code - 8];
}

float e4m3_value(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = exponent == 15 && mantissa == 7 ? NAN
                          : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                          : std::ldexp(8.0f + mantissa, exponent - 10);
  return code < 128 ? magnitude : -magnitude;
}

float nf4_value(int code) {
  constexpr std::array<double, 16> kValues = {-1.0,
                                              -0.6961928009986877,
                                              -0.5250730514526367,
                                              -0.39491748809814453,
                                              -0.28444138169288635,
                                              -0.18477343022823334,
                                              -0.09105003625154495,
                                              0.0,
                                              0.07958029955625534,
                                              0.16093020141124725,
                                              0.24611230194568634,
                                              0.33791524171829224,
                                              0.44070982933044434,
                                              0.5626170039176941,
                                              0.7229568362236023,
                                              1.0};
  return static_cast<float>(kValues[code]);
}

/// fp32 scales of every exponent, with few and with many mantissa bits.
std::vector<float> many_scales() {
  std::vector<float> scales = {0.0f,
                               -0.0f,
                               INFINITY,
                               -INFINITY,
                               NAN,
                               std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::denorm_min()};
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (std::uint32_t mantissa :
         {0x000000u, 0x000001u, 0x2aaaabu, 0x400000u, 0x5d1745u, 0x7fffffu}) {
      scales.push_back(std::bit_cast<float>(exponent << 23 | mantissa));
      scales.push_back(-scales.back());
    }
  }
  return scales;
}

/// Eight nibbles with `code` at `position` and others around it.
std::uint32_t word_with(int code, int position) {
  const std::uint32_t others = 0x9e3779b9u * (code + 16 * position + 1);
  return (others & ~(15u << 4 * position)) | static_cast<std::uint32_t>(code) << 4 * position;
}

template <typename Element, std::size_t Pairs>
std::vector<float> floats(const std::uint32_t (&pairs)[Pairs]) {
  std::vector<float> all;
  for (std::uint32_t pair : pairs) {
    all.push_back(floats_of(pair, Element{}).low);
    all.push_back(floats_of(pair, Element{}).high);
  }
  return all;
}

/// All codes at all columns of a word; column i of value_of(word, i).
template <typename Element, typename Decoder, typename Value>
void expect_nibbles(const Decoder& decoder, float scale, const Value& value_of) {
  for (int code = 0; code < 16; ++code) {
    for (int position = 0; position < 8; ++position) {
      const std::uint32_t word = word_with(code, position);
      std::uint32_t pairs[4];
      decoder.decode(word, pairs);
      const std::vector<float> weights = floats<Element>(pairs);
      for (int column = 0; column < 8; ++column) {
        const float expected = round_element<Element>(value_of(word, column) * scale);
        ASSERT_TRUE(same(weights[column], expected))
            << "word " << std::hex << word << " column " << column << " scale " << scale << ": "
            << weights[column] << ", not " << expected;
      }
    }
  }
}

int nibble(std::uint32_t word, int place) { return static_cast<int>(word >> 4 * place & 15); }

template <typename Element>
class WeightDecoders : public testing::Test {};
using Elements = testing::Types<__nv_bfloat16, __half>;
TYPED_TEST_SUITE(WeightDecoders, Elements);

TYPED_TEST(WeightDecoders, Mxfp4IsValueTimesScaleForEveryCodeAndScale) {
  for (std::uint32_t e8m0 = 0; e8m0 < 256; ++e8m0) {
    const float scale = e8m0 == 255 ? NAN : std::ldexp(1.0f, static_cast<int>(e8m0) - 127);
    ASSERT_TRUE(same(scale_of_e8m0(e8m0), scale)) << e8m0;
    expect_nibbles<TypeParam>(Mxfp4Decoder<TypeParam>(e8m0), scale,
                              [](auto word, int i) { return e2m1_value(nibble(word, i)); });
  }
}

TYPED_TEST(WeightDecoders, Int4IsValueTimesScaleForEveryCodeAndScale) {
  const auto value = [](auto word, int i) { return static_cast<float>(nibble(word, i) - 8); };
  for (std::uint32_t bits = 0; bits < 65536; bits += 37) {
    expect_nibbles<TypeParam>(Int4Decoder<TypeParam, __nv_bfloat16>(bits), scale_of_bf16(bits),
                              value);
    expect_nibbles<TypeParam>(Int4Decoder<TypeParam, __half>(bits), scale_of_fp16(bits), value);
  }
}

TYPED_TEST(WeightDecoders, Nf4IsValueTimesScaleForEveryCode) {
  for (float scale : many_scales()) {
    expect_nibbles<TypeParam>(Nf4Decoder<TypeParam>(scale), scale,
                              [](auto word, int i) { return nf4_value(nibble(word, i ^ 1)); });
  }
}

TYPED_TEST(WeightDecoders, Fp8IsValueTimesScaleForEveryCode) {
  for (float scale : many_scales()) {
    const Fp8Decoder<TypeParam> decoder(scale);
    for (std::uint32_t word = 0; word < 0x100; ++word) {
      const std::uint32_t bytes = word | (word ^ 0x80) << 8 | (255 - word) << 16 | (word ^ 1) << 24;
      std::uint32_t pairs[2];
      decoder.decode(bytes, pairs);
      const std::vector<float> weights = floats<TypeParam>(pairs);
      for (int i = 0; i < 4; ++i) {
        const float value = e4m3_value(static_cast<int>(bytes >> 8 * i & 255));
        const float expected = round_element<TypeParam>(value * scale);
        ASSERT_TRUE(same(weights[i], expected))
            << "code " << (bytes >> 8 * i & 255) << " scale " << scale << ": " << weights[i]
            << ", not " << expected;
      }
    }
  }
}

}  // namespace
}  // namespace moegemm::cuda
