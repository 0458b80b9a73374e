#include "cpu/simd/packed_weights.h"

#include <bit>
#include <vector>

#include "cpu/weight_decoding.h"

namespace moegemm::cpu::simd {
namespace {

constexpr std::array<float, 16> kInt4Values = {-8, -7, -6, -5, -4, -3, -2, -1,
                                               0,  1,  2,  3,  4,  5,  6,  7};

const float* table_values(WeightFormat format) {
  switch (format) {
    case WeightFormat::kMxfp4:
      return kE2m1Values.data();
    case WeightFormat::kNf4:
      return kNf4Values.data();
    case WeightFormat::kInt4:
      return kInt4Values.data();
    default:
      return nullptr;
  }
}

bool has_byte_lookups() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("avx512vbmi");
  return has;
#else
  return false;
#endif
}

template <typename T>
struct alignas(64) Tables {
  T at[256][kTableElems];
};

/// mxfp4's nibbles times each scale: a scale is one of 256, and a model uses few of them.
template <typename T>
const Tables<T>& mxfp4_tables() {
  static const Tables<T> tables = [] {
    Tables<T> all;
    for (int scale = 0; scale < 256; ++scale) {
      for (int i = 0; i < kTableElems; ++i) {
        store(kE2m1Values[i % 16] * e8m0_value(static_cast<std::uint8_t>(scale)), all.at[scale][i]);
      }
    }
    return all;
  }();
  return tables;
}

/// int4's nibbles times the scales of bf16 from 1/2 to 2, which have all low bytes. Other normal
/// products with the same low byte differ as their scales do, in the exponent. So the scale's bits
/// are taken away from a product's, and whoever adds those of another one has its product.
const Tables<BFloat16>& int4_tables() {
  static const Tables<BFloat16> tables = [] {
    Tables<BFloat16> all;
    for (int low_byte = 0; low_byte < 256; ++low_byte) {
      const BFloat16 scale = {static_cast<std::uint16_t>(0x3f00 + low_byte)};
      for (int i = 0; i < kTableElems; ++i) {
        BFloat16& element = all.at[low_byte][i];
        store(kInt4Values[i % 16] * to_float(scale), element);
        if (kInt4Values[i % 16] != 0) element.bits -= scale.bits;
      }
    }
    return all;
  }();
  return tables;
}

/// The elements of tables byte by byte: sixteen low ones, then sixteen high ones.
struct ByteTables {
  std::uint8_t at[256][2][16];
  explicit ByteTables(const Tables<BFloat16>& tables) {
    for (int row = 0; row < 256; ++row) {
      for (int i = 0; i < 16; ++i) {
        at[row][0][i] = static_cast<std::uint8_t>(tables.at[row][i].bits);
        at[row][1][i] = static_cast<std::uint8_t>(tables.at[row][i].bits >> 8);
      }
    }
  }
};

/// int4's without those of the scale's exponent: its upper byte is added to that of a product.
const ByteTables& int4_byte_tables() {
  static const ByteTables tables = [] {
    Tables<BFloat16> all = int4_tables();
    for (int low_byte = 0; low_byte < 256; ++low_byte) {
      for (int i = 0; i < kTableElems; ++i) {
        if (kInt4Values[i % 16] != 0) all.at[low_byte][i].bits += low_byte;
      }
    }
    return ByteTables(all);
  }();
  return tables;
}
const ByteTables& mxfp4_byte_tables() {
  static const ByteTables tables(mxfp4_tables<BFloat16>());
  return tables;
}

}  // namespace

PackedWeights packed_weights(const Quantization& quantization, DType dtype, const void* values,
                             const void* scales, std::int64_t expert, std::int64_t n,
                             std::int64_t k) {
  const QuantizedExpert of_expert(quantization, values, scales, expert, n, k);
  PackedWeights packed;
  packed.format = quantization.format;
  packed.scale_type = quantization.scale_type;
  packed.values = static_cast<const std::uint8_t*>(of_expert.values);
  packed.scales = of_expert.scales;
  packed.k = k;
  packed.block_n = quantization.block_n;
  packed.scale_columns = quantization.scale_columns(n, k);
  packed.block_k_shift = std::countr_zero(static_cast<std::uint64_t>(quantization.block_k));
  packed.flat_blocks = quantization.format == WeightFormat::kNf4;
  packed.byte_lookups = has_byte_lookups();
  packed.table_values = table_values(quantization.format);
  if (quantization.format == WeightFormat::kMxfp4) {
    packed.tables =
        with_element_type(dtype, []<typename T>(T*) -> const void* { return &mxfp4_tables<T>(); });
    if (dtype == DType::kBFloat16) packed.byte_tables = mxfp4_byte_tables().at[0][0];
  } else if (quantization.format == WeightFormat::kInt4 && dtype == DType::kBFloat16 &&
             quantization.scale_type == ScaleType::kBFloat16) {
    packed.tables = &int4_tables();
    packed.byte_tables = int4_byte_tables().at[0][0];
  }
  return packed;
}

}  // namespace moegemm::cpu::simd
