#pragma once

#include <cstdint>

#include "cuda/device/element.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "moegemm/quantization.h"

/// From packed values to pairs of bf16, a register at a time. The bits are those of value * scale
/// in fp32, rounded once.
///
/// Forward: a thread holds packed values of one row and takes the pairs (2 t, 2 t + 1) of each
/// eight, t being its place in the quad. dX: it holds those of two neighbouring rows, one in each
/// half of a register, and takes two columns (`which` = 0, 1) of both.
namespace moegemm::cuda::sm90 {

/// Two e4m3 values, the first in the low byte.
__device__ __forceinline__ float2 e4m3_pair(std::uint32_t bits) {
  return pair_to_float(ptx::cvt_rn_f16x2_e4m3x2(static_cast<std::uint16_t>(bits)), __half{});
}

/// The registers of half a stage: lane 4 g + t of warp w has [step][h + 2 u], features 16 w + g + 8
/// h (or Traits::feature_of) at depth 2 t + 8 u and the next.
using HalfStage = std::uint32_t[2][4];

constexpr int kHalfDepth = 32;

template <WeightFormat F>
struct Decoder;

/// Scales are bf16 factors, two to a register.
template <>
struct Decoder<WeightFormat::kMxfp4> {
  using Scale = std::uint32_t;
  using Loaded = std::uint8_t;
  static constexpr bool kBf16Scales = true;

  /// Twice 2^(byte - 127) times the 2^126 that `bits` leaves out, of bytes up to kMost: above, it
  /// would not fit.
  static __device__ __forceinline__ std::uint32_t factors(std::uint32_t byte) {
    return byte * 0x00800080u + 0x3f003f00u;
  }
  static constexpr std::uint32_t kMost = 128;
  /// What is left of a larger one.
  static __device__ __forceinline__ std::uint32_t excess(std::uint32_t byte) {
    return byte <= 128 ? 0x3f80 : (byte == 255 ? 0x7fc0 : (byte - 1) << 7);
  }

  /// Each half has a value on top of its low byte, its sign in all of the high one: sign, exponent
  /// and mantissa move to where bf16 has them.
  static __device__ __forceinline__ std::uint32_t bits(std::uint32_t nibbles) {
    return (nibbles << 2) & 0x81c081c0u;
  }
  static __device__ __forceinline__ std::uint32_t forward_selector(int t) {
    return (4 + t) | (12 + t) << 4 | t << 8 | (8 + t) << 12;
  }
  static __device__ __forceinline__ std::uint32_t forward(std::uint32_t word,
                                                          std::uint32_t selector, Scale scale) {
    return ptx::mul_rn_bf16x2(bits(ptx::prmt(word, word << 4, selector)), scale);
  }
  static __device__ __forceinline__ std::uint32_t dx_selector(int byte) {
    return byte | (8 + byte) << 4 | (2 + byte) << 8 | (10 + byte) << 12;
  }
  static __device__ __forceinline__ void dx(std::uint32_t rows, std::uint32_t selector, Scale scale,
                                            std::uint32_t& first, std::uint32_t& second) {
    const std::uint32_t low = rows << 4;
    first = ptx::mul_rn_bf16x2(bits(ptx::prmt(low, low, selector)), scale);
    second = ptx::mul_rn_bf16x2(bits(ptx::prmt(rows, rows, selector)), scale);
  }
};

template <>
struct Decoder<WeightFormat::kInt4> {
  using Scale = std::uint32_t;
  using Loaded = std::uint16_t;
  static constexpr bool kBf16Scales = true;

  static __device__ __forceinline__ std::uint32_t factors(std::uint32_t bf16) {
    return bf16 * 0x00010001u;
  }

  /// 128 + q in bf16, minus 136.
  static __device__ __forceinline__ std::uint32_t bits(std::uint32_t nibbles) {
    return ptx::sub_rn_bf16x2((nibbles & 0x000f000fu) | 0x43004300u, 0x43084308u);
  }
  static __device__ __forceinline__ std::uint32_t forward_selector(int t) {
    return t | (4 + t) << 8;
  }
  static __device__ __forceinline__ std::uint32_t forward(std::uint32_t word,
                                                          std::uint32_t selector, Scale scale) {
    return ptx::mul_rn_bf16x2(bits(ptx::prmt(word, word >> 4, selector)), scale);
  }
  static __device__ __forceinline__ std::uint32_t dx_selector(int byte) { return byte * 8; }
  static __device__ __forceinline__ void dx(std::uint32_t rows, std::uint32_t shift, Scale scale,
                                            std::uint32_t& first, std::uint32_t& second) {
    const std::uint32_t shifted = rows >> shift;
    first = ptx::mul_rn_bf16x2(bits(shifted), scale);
    second = ptx::mul_rn_bf16x2(bits(shifted >> 4), scale);
  }
};

/// Scales are fp32: one in forward, those of two rows in dX.
struct FloatDecoder {
  using Scale = float;
  static constexpr bool kBf16Scales = false;
  using Element = __nv_bfloat16;

  static __device__ __forceinline__ std::uint32_t scaled(float2 pair, float first, float second) {
    return round_pair(__fmul_rn(pair.x, first), __fmul_rn(pair.y, second), Element{});
  }
};

template <>
struct Decoder<WeightFormat::kFp8> : FloatDecoder {
  using Loaded = std::uint32_t;  ///< of any type: see load_scale

  /// Of eight values in two words.
  static __device__ __forceinline__ std::uint32_t forward_selector(int t) {
    return 2 * t | (2 * t + 1) << 4;
  }
  static __device__ __forceinline__ std::uint32_t forward(std::uint32_t low, std::uint32_t high,
                                                          std::uint32_t selector, Scale scale) {
    return scaled(e4m3_pair(ptx::prmt(low, high, selector)), scale, scale);
  }
  static __device__ __forceinline__ void dx(std::uint32_t rows, float2 scales, std::uint32_t& first,
                                            std::uint32_t& second) {
    first = scaled(e4m3_pair(__byte_perm(rows, 0, 0x4420)), scales.x, scales.y);
    second = scaled(e4m3_pair(__byte_perm(rows, 0, 0x4431)), scales.x, scales.y);
  }
};

/// dX, and tiles of few rows: a table in shared memory has the pair of fp32 numbers of every byte,
/// once for each bank pair: half a warp reads sixteen of them at once.
template <>
struct Decoder<WeightFormat::kNf4> : FloatDecoder {
  using Loaded = std::uint32_t;
  static constexpr int kPitch = 128;

  /// How far to turn a word left so that byte `byte` counts entries of the table.
  static __device__ __forceinline__ std::uint32_t turn(int byte) { return (7 - 8 * byte) & 31; }
  /// `table` is the thread's own column.
  static __device__ __forceinline__ float2 pair(const std::byte* table, std::uint32_t word,
                                                std::uint32_t turn) {
    const std::uint32_t offset = __funnelshift_l(word, word, turn) & (255 * kPitch);
    return *reinterpret_cast<const float2*>(table + offset);
  }
  static __device__ __forceinline__ std::uint32_t forward(const std::byte* table,
                                                          std::uint32_t word, std::uint32_t turn,
                                                          Scale scale) {
    return scaled(pair(table, word, turn), scale, scale);
  }
  static __device__ __forceinline__ void dx(const std::byte* table, std::uint32_t rows,
                                            std::uint32_t turn, float2 scales, std::uint32_t& first,
                                            std::uint32_t& second) {
    const float2 low = pair(table, rows, turn);
    const float2 high = pair(table, rows, turn + 16);
    first = scaled({low.x, high.x}, scales.x, scales.y);
    second = scaled({low.y, high.y}, scales.x, scales.y);
  }

  /// Forward in tiles of many rows. The products of a row's scale are few: sixteen for 64 weights.
  /// They are rounded once, and looked up by byte_perm: `low` and `high` have their low and high
  /// bytes.
  static __device__ __forceinline__ std::uint32_t forward_selector(int t) {
    return t | (4 + t) << 4;
  }
  /// The pairs of four words; thread t of a quad takes byte t of each, the first value on top.
  static __device__ __forceinline__ void forward(const uint4& words, std::uint32_t selector,
                                                 const uint4& low, const uint4& high,
                                                 std::uint32_t& first, std::uint32_t& second,
                                                 std::uint32_t& third, std::uint32_t& fourth) {
    look_up(__byte_perm(words.x, words.y, selector), low, high, first, second);
    look_up(__byte_perm(words.z, words.w, selector), low, high, third, fourth);
  }
  /// The pairs of the two low bytes.
  static __device__ __forceinline__ void look_up(std::uint32_t bytes, const uint4& low,
                                                 const uint4& high, std::uint32_t& first,
                                                 std::uint32_t& second) {
    const std::uint32_t upper = ptx::prmt(bytes, bytes << 4, 0x9d8c);  // places from 8 on
    const std::uint32_t place = bytes & 0x7777;
    const std::uint32_t lows =
        (ptx::prmt(low.x, low.y, place) & ~upper) | (ptx::prmt(low.z, low.w, place) & upper);
    const std::uint32_t highs =
        (ptx::prmt(high.x, high.y, place) & ~upper) | (ptx::prmt(high.z, high.w, place) & upper);
    first = __byte_perm(lows, highs, 0x4051);
    second = __byte_perm(lows, highs, 0x6273);
  }
  /// The sixteen products of a row's scale: `table` has their low bytes, and 2048 bytes further on
  /// their high ones.
  static __device__ __forceinline__ void write_products(std::byte* table, float scale) {
    constexpr auto kValues = kNf4Values;
    std::uint32_t low[4];
    std::uint32_t high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t first = scaled({kValues[4 * i], kValues[4 * i + 1]}, scale, scale);
      const std::uint32_t second = scaled({kValues[4 * i + 2], kValues[4 * i + 3]}, scale, scale);
      low[i] = __byte_perm(first, second, 0x6420);
      high[i] = __byte_perm(first, second, 0x7531);
    }
    reinterpret_cast<uint4*>(table)[0] = {low[0], low[1], low[2], low[3]};
    reinterpret_cast<uint4*>(table)[128] = {high[0], high[1], high[2], high[3]};
  }

  /// Fills the table, by all threads of a block.
  static __device__ __forceinline__ void fill(std::byte* table) {
    for (int i = threadIdx.x; i < 256 * 16; i += blockDim.x) {
      const int byte = i / 16;
      reinterpret_cast<float2*>(table)[i] = {value(byte >> 4), value(byte & 15)};
    }
  }
  static __device__ __forceinline__ float value(int place) {
    constexpr auto kValues = kNf4Values;
    float result = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) result = place == i ? kValues[i] : result;
    return result;
  }
};

/// A scale of any type as 32 bits, and as fp32.
__device__ __forceinline__ std::uint32_t load_scale(const std::byte* data, ScaleType type,
                                                    std::int64_t index) {
  switch (type) {
    case ScaleType::kE8m0:
      return __ldg(reinterpret_cast<const std::uint8_t*>(data) + index);
    case ScaleType::kFloat32:
      return __ldg(reinterpret_cast<const std::uint32_t*>(data) + index);
    default:
      return __ldg(reinterpret_cast<const std::uint16_t*>(data) + index);
  }
}
__device__ __forceinline__ float scale_value(std::uint32_t bits, ScaleType type) {
  switch (type) {
    case ScaleType::kE8m0:  // 0 is 2^-127, below the normal numbers
      return __uint_as_float(bits == 255 ? 0x7fc00000u : (bits == 0 ? 0x00400000u : bits << 23));
    case ScaleType::kFloat32:
      return __uint_as_float(bits);
    case ScaleType::kBFloat16:
      return __uint_as_float(bits << 16);
    default:
      return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
}

}  // namespace moegemm::cuda::sm90
