#include "cuda/device/weights/quad_decoders.cuh"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

/// Sixteen weights of a row, decoded by the four lanes of a quad, are those that the other kernels
/// decode, and each meets the row element of its own column.
namespace moegemm::cuda {
namespace {

using Element = __nv_bfloat16;
using Columns = std::array<std::uint32_t, 16>;  ///< a bf16 each

std::uint32_t half(std::uint32_t pair, int which) { return pair >> 16 * which & 0xffff; }

/// What each lane holds of a row that counts its columns, arranged as kernels do.
template <QuadOrder Order>
Columns columns_of_pairs(const std::uint32_t (&pairs)[4][2]) {
  Columns columns = {};
  for (int t = 0; t < 4; ++t) {
    const auto number = [&](int i) { return static_cast<std::uint32_t>(4 * t + i); };
    std::uint32_t row[2];
    arrange_quad<Order>(number(0) | number(1) << 16, number(2) | number(3) << 16, row);
    for (int i = 0; i < 4; ++i) columns.at(half(row[i / 2], i % 2)) = half(pairs[t][i / 2], i % 2);
  }
  return columns;
}

bool same(std::uint32_t a, std::uint32_t b) {
  const float x = std::bit_cast<float>(a << 16), y = std::bit_cast<float>(b << 16);
  return a == b || (std::isnan(x) && std::isnan(y));
}

/// Words in which every code is at every place.
std::vector<std::array<std::uint32_t, 2>> many_words() {
  std::vector<std::array<std::uint32_t, 2>> words;
  for (std::uint32_t i = 0; i < 64; ++i) {
    words.push_back({0x01234567u * (i % 16 + 1) + 0x11111111u * i, 0x9e3779b9u * (i + 1)});
    words.push_back({i % 16 * 0x11111111u, 0x76543210u ^ i * 0x01010101u});
  }
  return words;
}

/// `decode(low, high, t, pairs)` against `decoder` of the same scale.
template <typename Quad, typename Decode, typename Decoder>
void expect_weights_of(const Decode& decode, const Decoder& decoder) {
  for (const auto& words : many_words()) {
    std::uint32_t pairs[4][2], expected[2][4];
    for (int t = 0; t < 4; ++t) decode(words[0], words[1], t, pairs[t]);
    decoder.decode(words[0], expected[0]);
    decoder.decode(words[1], expected[1]);
    const Columns columns = columns_of_pairs<Quad::kOrder>(pairs);
    for (int column = 0; column < 16; ++column) {
      const std::uint32_t weight = half(expected[column / 8][column % 8 / 2], column % 2);
      ASSERT_TRUE(same(columns[column], weight))
          << std::hex << words[0] << " " << words[1] << " column " << column << ": "
          << columns[column] << ", not " << weight;
    }
  }
}

TEST(QuadDecoders, Mxfp4HasTheWeightsOfItsDecoderForEveryScale) {
  for (std::uint32_t e8m0 = 0; e8m0 < 256; ++e8m0) {
    SCOPED_TRACE(e8m0);
    const std::uint32_t factors = Mxfp4Quad::factors_of(std::min(e8m0, Mxfp4Quad::kMost));
    const auto decode = [&](std::uint32_t low, std::uint32_t high, int t,
                            std::uint32_t(&pairs)[2]) {
      Mxfp4Quad::decode(low, high, Mxfp4Quad::selector_of(t), factors, pairs);
      if (e8m0 <= Mxfp4Quad::kMost) return;
      for (std::uint32_t& pair : pairs) {
        pair = multiply_pairs(pair, Mxfp4Quad::excess_of(e8m0), Element{});
      }
    };
    expect_weights_of<Mxfp4Quad>(decode, Mxfp4Decoder<Element>(e8m0));
  }
  EXPECT_EQ(Mxfp4Quad::excess_of(Mxfp4Quad::kMost), 0x3f803f80u) << "one where one product does";
}

TEST(QuadDecoders, Int4HasTheWeightsOfItsDecoder) {
  for (std::uint32_t bits = 0; bits < 0x10000; bits += 97) {
    SCOPED_TRACE(bits);
    const auto decode = [&](std::uint32_t low, std::uint32_t high, int t,
                            std::uint32_t(&pairs)[2]) {
      Int4Quad::decode(low, high, Int4Quad::selector_of(t), Int4Quad::factors_of(bits), pairs);
    };
    expect_weights_of<Int4Quad>(decode, Int4Decoder<Element, Element>(bits));
  }
}

TEST(QuadDecoders, Nf4HasTheWeightsOfItsDecoder) {
  for (const float absmax : {0.0f, 1.0f, -1.0f, 0.3337f, 1e-40f, 3e38f, INFINITY, NAN}) {
    SCOPED_TRACE(absmax);
    const Nf4Products products = Nf4Quad::products_of(absmax);
    const auto decode = [&](std::uint32_t low, std::uint32_t high, int t,
                            std::uint32_t(&pairs)[2]) {
      const std::uint32_t word = t < 2 ? low : high;
      Nf4Quad::decode(word >> (t % 2 * 16) & 0xffff, products, pairs);
    };
    expect_weights_of<Nf4Quad>(decode, Nf4Decoder<Element>(absmax));
  }
}

TEST(QuadDecoders, Fp8LanesHaveAWordEach) {
  const std::uint32_t words[4] = {0x03020100u, 0x7e7f8081u, 0xfffe4038u, 0xb8c0d0e0u};
  std::uint32_t pairs[4][2];
  for (int t = 0; t < 4; ++t) Fp8Quad::decode(words[t], 0.37f, pairs[t]);
  const Columns columns = columns_of_pairs<Fp8Quad::kOrder>(pairs);
  for (int column = 0; column < 16; ++column) {
    std::uint32_t expected[2];
    Fp8Decoder<Element>(0.37f).decode(words[column / 4], expected);
    EXPECT_TRUE(same(columns[column], half(expected[column % 4 / 2], column % 2))) << column;
  }
}

}  // namespace
}  // namespace moegemm::cuda
