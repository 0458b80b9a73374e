#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstdint>
#include <type_traits>

#include "cuda/device/host_device.h"
#include "moegemm/quantization.h"
#if defined(__CUDACC__)
#include "cuda/ptx/arithmetic.cuh"
#endif

/// For loops of functions that the host compiler builds, too.
#if defined(__CUDA_ARCH__)
#define MOEGEMM_UNROLL _Pragma("unroll")
#else
#define MOEGEMM_UNROLL
#endif

/// From a checkpoint's packed weights to pairs of bf16 or fp16, neighbouring columns, the first in
/// the low half. Every weight is its value times its scale in fp32, rounded once to the element
/// type: where fewer instructions give the same bits, those. A decoder is made from a scale and
/// serves the columns that share it. Words are little endian, as they lie in memory.
//
// clang-format off
/// | decoder      | packed word                         | weights of a word | scale        |
/// |--------------|-------------------------------------|-------------------|--------------|
/// | Mxfp4Decoder | eight e2m1, column i at bit 4 i     | 8                 | e8m0         |
/// | Int4Decoder  | eight q + 8, column i at bit 4 i    | 8                 | bf16 or fp16 |
/// | Nf4Decoder   | eight, even columns in high nibbles | 8                 | fp32         |
/// | Fp8Decoder   | four e4m3fn                         | 4                 | any, as fp32 |
// clang-format on
namespace moegemm::cuda {

// Two 16-bit numbers in a register: one instruction each on the GPU, the same bits on the host,
// where the maths of kernels is tested. The last argument says which type they have.

/// See ptx::prmt.
MOEGEMM_HOST_DEVICE std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b,
                                                std::uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return ptx::prmt(a, b, selector);
#else
  const std::uint64_t bytes = std::uint64_t{b} << 32 | a;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t nibble = selector >> 4 * i & 15;
    const auto byte = static_cast<std::uint32_t>(bytes >> 8 * (nibble & 7)) & 0xff;
    result |= (nibble < 8 ? byte : (byte >> 7) * 0xff) << 8 * i;
  }
  return result;
#endif
}

MOEGEMM_HOST_DEVICE std::uint32_t and_or(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
#if defined(__CUDA_ARCH__)
  return ptx::lop3_and_or(a, b, c);
#else
  return (a & b) | c;
#endif
}

/// The two as fp32.
struct FloatPair {
  float low;
  float high;
};
MOEGEMM_HOST_DEVICE FloatPair floats_of(std::uint32_t pair, __nv_bfloat16) {
  return {std::bit_cast<float>(pair << 16), std::bit_cast<float>(pair & 0xffff0000u)};
}
MOEGEMM_HOST_DEVICE FloatPair floats_of(std::uint32_t pair, __half) {
  const auto half = [&](int shift) {
    __half_raw raw;
    raw.x = static_cast<unsigned short>(pair >> shift);
    return __half2float(__half(raw));
  };
  return {half(0), half(16)};
}

#if defined(__CUDA_ARCH__)
/// Each rounded once.
MOEGEMM_HOST_DEVICE std::uint32_t pair_of(const FloatPair& floats, __nv_bfloat16) {
  return ptx::cvt_rn_bf16x2(floats.high, floats.low);
}
MOEGEMM_HOST_DEVICE std::uint32_t pair_of(const FloatPair& floats, __half) {
  return ptx::cvt_rn_f16x2(floats.high, floats.low);
}

/// Products, each rounded once; subnormal numbers are numbers.
MOEGEMM_HOST_DEVICE std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b, __nv_bfloat16) {
  return ptx::fma_rn_bf16x2(a, b, 0x80008000u);  // sm_80 has no product alone
}
MOEGEMM_HOST_DEVICE std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b, __half) {
  return ptx::mul_rn_f16x2(a, b);
}

/// Sums, each rounded once.
MOEGEMM_HOST_DEVICE std::uint32_t add_pairs(std::uint32_t a, std::uint32_t b, __nv_bfloat16) {
  return ptx::fma_rn_bf16x2(a, 0x3f803f80u, b);
}
MOEGEMM_HOST_DEVICE std::uint32_t add_pairs(std::uint32_t a, std::uint32_t b, __half) {
  return ptx::add_rn_f16x2(a, b);
}
#else
inline std::uint32_t rounded_bits(float value, __nv_bfloat16) {
  return static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(value)).x;
}
inline std::uint32_t rounded_bits(float value, __half) {
  return static_cast<__half_raw>(__float2half_rn(value)).x;
}
template <typename T>
MOEGEMM_HOST_DEVICE std::uint32_t pair_of(const FloatPair& floats, T) {
  return rounded_bits(floats.low, T{}) | rounded_bits(floats.high, T{}) << 16;
}
template <typename T>
MOEGEMM_HOST_DEVICE std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b, T) {
  const FloatPair x = floats_of(a, T{}), y = floats_of(b, T{});
  return pair_of({x.low * y.low, x.high * y.high}, T{});
}
template <typename T>
MOEGEMM_HOST_DEVICE std::uint32_t add_pairs(std::uint32_t a, std::uint32_t b, T) {
  const FloatPair x = floats_of(a, T{}), y = floats_of(b, T{});
  return pair_of({x.low + y.low, x.high + y.high}, T{});
}
#endif

/// Scales as fp32, exactly.
MOEGEMM_HOST_DEVICE float scale_of_e8m0(std::uint32_t byte) {
  // 2^-127 is subnormal; 255 is NaN.
  return std::bit_cast<float>(byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : byte << 23);
}
MOEGEMM_HOST_DEVICE float scale_of_bf16(std::uint32_t bits) {
  return std::bit_cast<float>(bits << 16);
}
MOEGEMM_HOST_DEVICE float scale_of_fp16(std::uint32_t bits) {
  return floats_of(bits, __half{}).low;
}

/// A stored scale, whose bits are the lowest of the word.
MOEGEMM_HOST_DEVICE float scale_value(ScaleType type, std::uint32_t word) {
  switch (type) {
    case ScaleType::kFloat32:
      return std::bit_cast<float>(word);
    case ScaleType::kBFloat16:
      return scale_of_bf16(word & 0xffff);
    case ScaleType::kFloat16:
      return scale_of_fp16(word & 0xffff);
    case ScaleType::kE8m0:
      break;
  }
  return scale_of_e8m0(word & 0xff);
}

/// Two exact values, of type Values, times a scale.
template <typename Values, typename Element>
MOEGEMM_HOST_DEVICE std::uint32_t scale_values(std::uint32_t values, float scale, Element) {
  const FloatPair floats = floats_of(values, Values{});
  return pair_of({floats.low * scale, floats.high * scale}, Element{});
}

template <typename Element>
class Mxfp4Decoder {
  static constexpr bool kBf16 = !std::is_same_v<Element, __half>;

 public:
  static constexpr int kWordWeights = 8;

  explicit MOEGEMM_HOST_DEVICE Mxfp4Decoder(std::uint32_t e8m0)
      : e8m0_(e8m0), factor_(factor_of(e8m0) * 0x00010001u) {}

  /// Whether one product does.
  MOEGEMM_HOST_DEVICE bool is_usual() const { return e8m0_ <= kLargestUsual; }

  template <bool Usual>
  MOEGEMM_HOST_DEVICE void decode(std::uint32_t word, std::uint32_t (&pairs)[4]) const {
    const std::uint32_t low_nibbles = word << 4;
    MOEGEMM_UNROLL
    for (int t = 0; t < 4; ++t) {
      const std::uint32_t small = small_values(word, low_nibbles, selector_of(t));
      pairs[t] = Usual ? multiply_pairs(small, factor_, Element{})
                       : scale_values<Element>(multiply_pairs(small, kUnit, Element{}),
                                               scale_of_e8m0(e8m0_), Element{});
    }
  }
  MOEGEMM_HOST_DEVICE void decode(std::uint32_t word, std::uint32_t (&pairs)[4]) const {
    if (is_usual()) return decode<true>(word, pairs);
    decode<false>(word, pairs);
  }

  /// For kernels that hold pairs of their own: both values of byte t, divided by kUnit. A value is
  /// sign, exponent and mantissa at the place of the lowest exponents of Element. `low_nibbles` is
  /// word << 4.
  static MOEGEMM_HOST_DEVICE std::uint32_t small_values(std::uint32_t word,
                                                        std::uint32_t low_nibbles,
                                                        std::uint32_t selector) {
    // Each half: the sign eight times, then a byte with the nibble on top.
    const std::uint32_t halves = permute_bytes(word, low_nibbles, selector);
    return kBf16 ? (halves << 2) & 0x81c081c0u : (halves << 5) & 0x8e008e00u;
  }
  static MOEGEMM_HOST_DEVICE constexpr std::uint32_t selector_of(int t) {
    return static_cast<std::uint32_t>((4 + t) | (12 + t) << 4 | t << 8 | (8 + t) << 12);
  }
  /// The scale times kUnit, for scales up to kLargestUsual.
  static MOEGEMM_HOST_DEVICE std::uint32_t factor_of(std::uint32_t e8m0) {
    if (kBf16) return (e8m0 + 126) << 7;
    const int exponent = static_cast<int>(e8m0) - 127 + 14;  // below -24 all weights are zeros
    return exponent < -24   ? 0u
           : exponent < -14 ? 1u << (exponent + 24)
                            : static_cast<std::uint32_t>(exponent + 15) << 10;
  }
  static constexpr std::uint32_t kUnit = kBf16 ? 0x7e807e80u : 0x74007400u;  ///< 2^126, 2^14
  static constexpr std::uint32_t kLargestUsual = 128;

 private:
  std::uint32_t e8m0_;
  std::uint32_t factor_;
};

/// `Scale` is the type of the stored scale.
template <typename Element, typename Scale>
class Int4Decoder {
  static constexpr bool kBf16 = !std::is_same_v<Element, __half>;
  static constexpr bool kSame = std::is_same_v<Element, Scale>;

 public:
  static constexpr int kWordWeights = 8;

  explicit MOEGEMM_HOST_DEVICE Int4Decoder(std::uint32_t bits) : factor_(bits * 0x00010001u) {}

  MOEGEMM_HOST_DEVICE void decode(std::uint32_t word, std::uint32_t (&pairs)[4]) const {
    const std::uint32_t high_nibbles = word >> 4;
    MOEGEMM_UNROLL
    for (int t = 0; t < 4; ++t) {
      const std::uint32_t exact = values(word, high_nibbles, selector_of(t));
      // A product of two such numbers is exact in fp32.
      pairs[t] = kSame ? multiply_pairs(exact, factor_, Element{})
                       : scale_values<Element>(exact, floats_of(factor_, Scale{}).low, Element{});
    }
  }

  /// Both values of byte t, for kernels that hold pairs of their own; `high_nibbles` is word >> 4.
  static MOEGEMM_HOST_DEVICE std::uint32_t values(std::uint32_t word, std::uint32_t high_nibbles,
                                                  std::uint32_t selector) {
    // The nibbles become the last bits of 128 + q (fp16: 1024 + q), less 136 (1032).
    const std::uint32_t bytes = permute_bytes(word, high_nibbles, selector);
    return kBf16 ? add_pairs(and_or(bytes, 0x000f000fu, 0x43004300u), 0xc308c308u, Element{})
                 : add_pairs(and_or(bytes, 0x000f000fu, 0x64006400u), 0xe408e408u, Element{});
  }
  static MOEGEMM_HOST_DEVICE constexpr std::uint32_t selector_of(int t) {
    return static_cast<std::uint32_t>(t * 0x11 + (4 + t) * 0x1100);
  }

 private:
  std::uint32_t factor_;  ///< the scale twice
};

/// A scale serves at least 32 weights of 16 values: the sixteen products come first, as tables of
/// their low and high bytes, four to a register. A weight is a byte of either.
template <typename Element>
class Nf4Decoder {
 public:
  static constexpr int kWordWeights = 8;

  explicit MOEGEMM_HOST_DEVICE Nf4Decoder(float absmax) {
    constexpr auto kValues = kNf4Values;
    MOEGEMM_UNROLL
    for (int i = 0; i < 4; ++i) {
      const auto products = [&](int first) {
        return pair_of({kValues[first] * absmax, kValues[first + 1] * absmax}, Element{});
      };
      const std::uint32_t even = products(4 * i), odd = products(4 * i + 2);
      low_[i] = permute_bytes(even, odd, 0x6420);
      high_[i] = permute_bytes(even, odd, 0x7531);
    }
  }

  MOEGEMM_HOST_DEVICE void decode(std::uint32_t word, std::uint32_t (&pairs)[4]) const {
    const std::uint32_t low_nibbles = word << 4;
    const std::uint32_t entries = word & 0x77777777u;
    MOEGEMM_UNROLL
    for (int half = 0; half < 2; ++half) {  // of the word: four nibbles
      const std::uint32_t selector = entries >> 16 * half;
      // All ones where a nibble is 8 or more.
      const std::uint32_t upper = permute_bytes(low_nibbles, word, half == 0 ? 0xd9c8 : 0xfbea);
      const auto look_up = [&](const std::uint32_t(&table)[4]) {
        return (permute_bytes(table[0], table[1], selector) & ~upper) |
               (permute_bytes(table[2], table[3], selector) & upper);
      };
      const std::uint32_t low = look_up(low_), high = look_up(high_);
      pairs[2 * half] = permute_bytes(low, high, 0x4051);  // the high nibble comes first
      pairs[2 * half + 1] = permute_bytes(low, high, 0x6273);
    }
  }

 private:
  std::uint32_t low_[4];
  std::uint32_t high_[4];
};

template <typename Element>
class Fp8Decoder {
 public:
  static constexpr int kWordWeights = 4;

  explicit MOEGEMM_HOST_DEVICE Fp8Decoder(float scale) : scale_(scale) {}

  MOEGEMM_HOST_DEVICE void decode(std::uint32_t word, std::uint32_t (&pairs)[2]) const {
    pairs[0] = scale_values<__half>(values<0>(word), scale_, Element{});
    pairs[1] = scale_values<__half>(values<1>(word), scale_, Element{});
  }

  /// The values of bytes 2 Pair and 2 Pair + 1, as fp16, which has all of them.
  template <int Pair>
  static MOEGEMM_HOST_DEVICE std::uint32_t values(std::uint32_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return ptx::cvt_rn_f16x2_e4m3x2(static_cast<std::uint16_t>(word >> 16 * Pair));
#else
    // Each half: the sign eight times, then the byte. Exponent and mantissa go where fp16 has them;
    // its exponents are 8 higher.
    const std::uint32_t halves = permute_bytes(word, 0, Pair == 0 ? 0x9180 : 0xb3a2);
    const std::uint32_t magnitudes = (halves << 7) & 0x3f803f80u;
    // One more than the largest magnitude, which is NaN, carries into the last bit of a NaN here.
    const std::uint32_t nan = (magnitudes + 0x00800080u) & 0x40004000u;
    return multiply_pairs(magnitudes | nan | (halves & 0x80008000u), 0x5c005c00u, __half{});
#endif
  }

 private:
  float scale_;
};

}  // namespace moegemm::cuda
