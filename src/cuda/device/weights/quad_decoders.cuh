#pragma once

#include "cuda/device/weights/weight_decoders.cuh"

/// Weights in the order of mma.sync: of 16 packed weights that follow one another in a row, lane t
/// of a quad decodes 4 t to 4 t + 3, as two pairs of bf16. Which of the four make a pair is the
/// decoder's choice: the rows that they are multiplied with are arranged alike, and inside a group
/// of 16 the order does not change the sum.
namespace moegemm::cuda {

/// Of four neighbours x, which two are multiplied with a decoder's first pair, which with the
/// second.
enum class QuadOrder {
  kNeighbours,  ///< (x0, x1), (x2, x3)
  kOddFirst,    ///< (x1, x3), (x0, x2): high nibbles of two bytes, then the low ones
};

/// `low` has x0 and x1, `high` x2 and x3.
template <QuadOrder Order>
MOEGEMM_HOST_DEVICE void arrange_quad(std::uint32_t low, std::uint32_t high,
                                      std::uint32_t (&pairs)[2]) {
  pairs[0] = Order == QuadOrder::kNeighbours ? low : permute_bytes(low, high, 0x7632);
  pairs[1] = Order == QuadOrder::kNeighbours ? high : permute_bytes(low, high, 0x5410);
}

/// Formats whose scale multiplies bf16: 16 weights are `low` and `high`, `factors` the scale twice.
struct Mxfp4Quad {
  static constexpr QuadOrder kOrder = QuadOrder::kOddFirst;
  using Decoder = Mxfp4Decoder<__nv_bfloat16>;

  /// Each half: one of the lane's bytes, its highest bit eight times on top.
  static MOEGEMM_HOST_DEVICE std::uint32_t selector_of(std::uint32_t t) {
    return 0x9180u + t * 0x2222u;
  }
  static MOEGEMM_HOST_DEVICE void decode(std::uint32_t low, std::uint32_t high,
                                         std::uint32_t selector, std::uint32_t factors,
                                         std::uint32_t (&pairs)[2]) {
    const std::uint32_t bytes = permute_bytes(low, high, selector);
    // Sign, exponent and mantissa to where bf16 has them: see Mxfp4Decoder::small_values.
    const std::uint32_t upper = (bytes << 2) & 0x81c081c0u;
    const std::uint32_t lower = ((bytes & 0x000f000fu) * 0x1040u) & 0x81c081c0u;
    pairs[0] = multiply_pairs(upper, factors, __nv_bfloat16{});
    pairs[1] = multiply_pairs(lower, factors, __nv_bfloat16{});
  }

  /// Of a scale, clipped to what one product does; `excess` is what is left then.
  static MOEGEMM_HOST_DEVICE std::uint32_t factors_of(std::uint32_t e8m0) {
    return e8m0 * 0x00800080u + 0x3f003f00u;
  }
  static constexpr std::uint32_t kMost = Decoder::kLargestUsual;
  static MOEGEMM_HOST_DEVICE std::uint32_t excess_of(std::uint32_t e8m0) {
    return (e8m0 <= kMost ? 0x3f80u : (e8m0 == 255 ? 0x7fc0u : (e8m0 - 1) << 7)) * 0x00010001u;
  }
};

struct Int4Quad {
  static constexpr QuadOrder kOrder = QuadOrder::kOddFirst;

  static MOEGEMM_HOST_DEVICE std::uint32_t selector_of(std::uint32_t t) {
    return 0x0100u + t * 0x0202u;
  }
  static MOEGEMM_HOST_DEVICE void decode(std::uint32_t low, std::uint32_t high,
                                         std::uint32_t selector, std::uint32_t factors,
                                         std::uint32_t (&pairs)[2]) {
    const std::uint32_t bytes = permute_bytes(low, high, selector);
    const auto value = [&](std::uint32_t nibbles) {  // 128 + q, less 136
      return add_pairs(and_or(nibbles, 0x000f000fu, 0x43004300u), 0xc308c308u, __nv_bfloat16{});
    };
    pairs[0] = multiply_pairs(value(bytes >> 4), factors, __nv_bfloat16{});
    pairs[1] = multiply_pairs(value(bytes), factors, __nv_bfloat16{});
  }
  static MOEGEMM_HOST_DEVICE std::uint32_t factors_of(std::uint32_t bf16) {
    return bf16 * 0x00010001u;
  }
};

/// The sixteen products of nf4's table and a scale: their low and high bytes, four to a word.
struct Nf4Products {
  struct Table {
    std::uint32_t first, second, third, fourth;
  };
  Table low, high;
};

struct Nf4Quad {
  static constexpr QuadOrder kOrder = QuadOrder::kNeighbours;

  static MOEGEMM_HOST_DEVICE Nf4Products products_of(float absmax) {
    Nf4Products products;
    four_products<0>(absmax, products.low.first, products.high.first);
    four_products<4>(absmax, products.low.second, products.high.second);
    four_products<8>(absmax, products.low.third, products.high.third);
    four_products<12>(absmax, products.low.fourth, products.high.fourth);
    return products;
  }
  /// `nibbles` are the four of the lane, in their 16 bits.
  static MOEGEMM_HOST_DEVICE void decode(std::uint32_t nibbles, const Nf4Products& products,
                                         std::uint32_t (&pairs)[2]) {
    const std::uint32_t entries = nibbles & 0x7777u;
    // All ones where a nibble is 8 or more.
    const std::uint32_t upper = permute_bytes(nibbles << 4, nibbles, 0xd9c8);
    const auto look_up = [&](const Nf4Products::Table& table) {
      return (permute_bytes(table.first, table.second, entries) & ~upper) |
             (permute_bytes(table.third, table.fourth, entries) & upper);
    };
    const std::uint32_t lows = look_up(products.low), highs = look_up(products.high);
    pairs[0] = permute_bytes(lows, highs, 0x4051);  // the high nibble comes first
    pairs[1] = permute_bytes(lows, highs, 0x6273);
  }

 private:
  template <int First>
  static MOEGEMM_HOST_DEVICE void four_products(float absmax, std::uint32_t& low,
                                                std::uint32_t& high) {
    constexpr float k0 = kNf4Values[First], k1 = kNf4Values[First + 1];
    constexpr float k2 = kNf4Values[First + 2], k3 = kNf4Values[First + 3];
    const std::uint32_t even = pair_of({k0 * absmax, k1 * absmax}, __nv_bfloat16{});
    const std::uint32_t odd = pair_of({k2 * absmax, k3 * absmax}, __nv_bfloat16{});
    low = permute_bytes(even, odd, 0x6420);
    high = permute_bytes(even, odd, 0x7531);
  }
};

/// 16 weights are four words, of which a lane has its own.
struct Fp8Quad {
  static constexpr QuadOrder kOrder = QuadOrder::kNeighbours;

  static MOEGEMM_HOST_DEVICE void decode(std::uint32_t word, float scale,
                                         std::uint32_t (&pairs)[2]) {
    Fp8Decoder<__nv_bfloat16>(scale).decode(word, pairs);
  }
};

}  // namespace moegemm::cuda
