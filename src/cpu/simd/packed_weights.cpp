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

/// mxfp4's nibbles times each scale: a scale is one of 256, and a model uses few of them.
template <typename T>
const T* mxfp4_tables() {
  static const std::vector<T> tables = [] {
    std::vector<T> all(256 * 16);
    for (int scale = 0; scale < 256; ++scale) {
      for (int nibble = 0; nibble < 16; ++nibble) {
        store(kE2m1Values[nibble] * e8m0_value(static_cast<std::uint8_t>(scale)),
              all[16 * scale + nibble]);
      }
    }
    return all;
  }();
  return tables.data();
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
  packed.table_values = table_values(quantization.format);
  if (quantization.format == WeightFormat::kMxfp4) {
    packed.tables =
        with_element_type(dtype, []<typename T>(T*) -> const void* { return mxfp4_tables<T>(); });
  }
  return packed;
}

}  // namespace moegemm::cpu::simd
