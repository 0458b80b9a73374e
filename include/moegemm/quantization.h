#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "moegemm/kinds.h"
#include "moegemm/tensor.h"

/// Weights as checkpoints store them: packed values, and a scale for each block of them. A
/// quantised W is frozen: forward and dX read it, nothing writes it.
namespace moegemm {

enum class WeightFormat : std::uint8_t {
  kPlain,  ///< not quantised
  kMxfp4,  ///< e2m1, two to a byte, element 0 in the low half
  kFp8,    ///< e4m3fn
  kInt4,   ///< q + 8, eight to an int32, element i in bits 4 i to 4 i + 3
  kNf4,    ///< places in bitsandbytes' table, two to a byte, element 0 in the high half
};

enum class ScaleType : std::uint8_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kE8m0,  ///< 2^(byte - 127); 255 is NaN
};

/// What the library knows of a weight format. Its arithmetic is in a table of each backend.
struct WeightFormatInfo {
  WeightFormat value;
  const char* name;
  int bits;  ///< of a value
};
/// Those that are quantised.
inline constexpr WeightFormatInfo kWeightFormats[] = {
    {WeightFormat::kMxfp4, "mxfp4", 4},
    {WeightFormat::kFp8, "fp8", 8},
    {WeightFormat::kInt4, "int4", 4},
    {WeightFormat::kNf4, "nf4", 4},
};

struct ScaleTypeInfo {
  ScaleType value;
  const char* name;
  int bytes;
};
inline constexpr ScaleTypeInfo kScaleTypes[] = {
    {ScaleType::kFloat32, "fp32", 4},
    {ScaleType::kBFloat16, "bf16", 2},
    {ScaleType::kFloat16, "fp16", 2},
    {ScaleType::kE8m0, "e8m0", 1},
};

constexpr int scale_bytes(ScaleType type) {
  for (const ScaleTypeInfo& info : kScaleTypes) {
    if (info.value == type) return info.bytes;
  }
  return 0;
}

/// e2m1: what the four bits of an mxfp4 value mean.
inline constexpr std::array<float, 16> kE2m1Values = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,
                                                      4.0f,  6.0f,  -0.0f, -0.5f, -1.0f, -1.5f,
                                                      -2.0f, -3.0f, -4.0f, -6.0f};
/// bitsandbytes' table of nf4, in its fp32 numbers.
inline constexpr std::array<float, 16> kNf4Values = {-1.0f,
                                                     -0.6961928009986877f,
                                                     -0.5250730514526367f,
                                                     -0.39491748809814453f,
                                                     -0.28444138169288635f,
                                                     -0.18477343022823334f,
                                                     -0.09105003625154495f,
                                                     0.0f,
                                                     0.07958029955625534f,
                                                     0.16093020141124725f,
                                                     0.24611230194568634f,
                                                     0.33791524171829224f,
                                                     0.44070982933044434f,
                                                     0.5626170039176941f,
                                                     0.7229568362236023f,
                                                     1.0f};

/// How W is quantised, as pure data: part of a Problem. A weight is value * scale in fp32, rounded
/// once to the dtype of X. One scale serves `block_n` rows times `block_k` columns of W_e [N, K]:
///   mxfp4  1 x 32, e8m0
///   fp8    128 x 128 (the last block of a side may be smaller), 1 x K (one for each row) or N x K
///          (one for each expert); any scale type
///   int4   1 x 32, 64 or 128, bf16 or fp16
///   nf4    fp32, for block_k consecutive values of the expert's matrix read row after row, a power
///          of two from 32 to 4096; the scale of W_e[n, k] is number (n * K + k) / block_k
struct Quantization {
  WeightFormat format = WeightFormat::kPlain;
  ScaleType scale_type = ScaleType::kFloat32;
  std::int64_t block_n = 1;
  std::int64_t block_k = 32;

  constexpr bool plain() const { return format == WeightFormat::kPlain; }
  constexpr int bits() const {
    for (const WeightFormatInfo& info : kWeightFormats) {
      if (info.value == format) return info.bits;
    }
    return 0;
  }
  /// Rows of scales of an expert.
  constexpr std::int64_t scale_rows(std::int64_t n) const {
    return format == WeightFormat::kNf4 ? 1 : (n + block_n - 1) / block_n;
  }
  /// Scales in each of those rows.
  constexpr std::int64_t scale_columns(std::int64_t n, std::int64_t k) const {
    return ((format == WeightFormat::kNf4 ? n * k : k) + block_k - 1) / block_k;
  }
  constexpr std::int64_t expert_scales(std::int64_t n, std::int64_t k) const {
    return scale_rows(n) * scale_columns(n, k);
  }
  /// Of the expert's scales, the one of W_e[row, column].
  constexpr std::int64_t scale_of(std::int64_t row, std::int64_t column, std::int64_t n,
                                  std::int64_t k) const {
    if (format == WeightFormat::kNf4) return (row * k + column) / block_k;
    return row / block_n * scale_columns(n, k) + column / block_k;
  }
  /// Bytes of packed values of an expert. Values follow one another without gaps; an odd number of
  /// nibbles (nf4 alone) leaves the last byte half empty.
  constexpr std::int64_t expert_bytes(std::int64_t n, std::int64_t k) const {
    return (n * k * bits() + 7) / 8;
  }
  /// Packed values and scales of an expert.
  constexpr std::int64_t stored_bytes(std::int64_t n, std::int64_t k) const {
    return expert_bytes(n, k) + expert_scales(n, k) * scale_bytes(scale_type);
  }
  bool operator==(const Quantization&) const = default;
};

/// The scales of a quantised W, without gaps: [E, rows, columns] of Quantization::scale_rows and
/// scale_columns; dimensions of 1 at the end may be left out. nf4: [E, columns].
struct ScalesView {
  const void* data = nullptr;
  ScaleType type = ScaleType::kFloat32;
  int rank = 0;                            ///< 1, 2 or 3; 0 when not given
  std::array<std::int64_t, 3> shape = {};  ///< the first `rank` entries count
  Device device;

  bool given() const { return rank != 0; }
};

MOEGEMM_API const char* to_string(WeightFormat format);  ///< "plain", "mxfp4", ...
MOEGEMM_API const char* to_string(ScaleType type);       ///< "fp32", "bf16", "fp16", "e8m0"
/// "mxfp4", "fp8/128x128(fp32)", "int4/32(bf16)", "nf4/64", "plain".
MOEGEMM_API std::string to_string(const Quantization& quantization);
MOEGEMM_API std::string to_string(const ScalesView& scales);  ///< "e8m0[8, 64, 2] on cpu"
/// What "mxfp4", "fp8/128x128", "fp8/channel", "fp8/tensor", "int4/32" or "nf4/64" means for a W_e
/// of [n, k] with scales of that type; throws kInvalidValue with what is accepted.
MOEGEMM_API Quantization parse_quantization(const std::string& text, ScaleType scale_type,
                                            std::int64_t n, std::int64_t k);

}  // namespace moegemm
