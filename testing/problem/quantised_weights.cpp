#include "testing/problem/quantised_weights.h"

#include <cmath>

#include "testing/numerics/weight_formats.h"

namespace moegemm::testing {
float QuantisedWeights::scale(std::int64_t index) const {
  return decode_scale(quantization.scale_type, scales.data(), index);
}

void QuantisedWeights::set_scale(std::int64_t index, float value) {
  encode_scale(quantization.scale_type, scales.data(), index, value);
}

std::vector<float> QuantisedWeights::row(std::int64_t expert, std::int64_t row) const {
  const Quantization& q = quantization;
  const unsigned char* const bytes = values.data() + expert * q.expert_bytes(n, k);
  const bool flat = q.format == WeightFormat::kNf4;
  const std::int64_t scales_of_row =
      expert * q.expert_scales(n, k) +
      (flat ? 0 : row / q.block_n * ((k + q.block_k - 1) / q.block_k));
  std::vector<float> decoded(k);
  std::int64_t block = -1;
  double factor = 0;
  for (std::int64_t column = 0; column < k; ++column) {
    const std::int64_t place = row * k + column;
    const unsigned char byte = bytes[q.bits() == 8 ? place : place / 2];
    const std::int64_t needed = (flat ? place : column) / q.block_k;
    if (needed != block) {
      block = needed;
      factor = scale(scales_of_row + block);
    }
    // Exact in double: the conversion is the one rounding to fp32.
    decoded[column] = static_cast<float>(packed_value(q.format, byte, place % 2 != 0) * factor);
  }
  return decoded;
}

ScalesView QuantisedWeights::scales_view(const void* data, Device device) const {
  ScalesView view;
  view.data = data;
  view.type = quantization.scale_type;
  view.device = device;
  const bool flat = quantization.format == WeightFormat::kNf4;
  view.rank = flat ? 2 : 3;
  view.shape = {experts, flat ? quantization.scale_columns(n, k) : quantization.scale_rows(n),
                flat ? 0 : quantization.scale_columns(n, k)};
  return view;
}

QuantisedWeights random_weights(const Quantization& quantization, std::int64_t experts,
                                std::int64_t n, std::int64_t k, float magnitude,
                                bool extreme_scales, Random& random) {
  QuantisedWeights w{quantization, experts, n, k, {}, {}};
  w.values.resize(experts * quantization.expert_bytes(n, k));
  for (unsigned char& byte : w.values) {
    byte = static_cast<unsigned char>(random.bits());
    if (std::isnan(packed_value(quantization.format, byte, false)) && !extreme_scales) byte ^= 1;
  }
  w.scales.resize(w.scale_count() * scale_bytes(quantization.scale_type));
  if (extreme_scales) {
    for (unsigned char& byte : w.scales) byte = static_cast<unsigned char>(random.bits());
    return w;
  }
  const auto largest = static_cast<float>(made_format(quantization.format).largest);
  for (std::int64_t i = 0; i < w.scale_count(); ++i) {
    const float about = 0.5f + 0.25f * random.symmetric();  // negative ones are as good as others
    const float sign = quantization.scale_type != ScaleType::kE8m0 && random.chance(4) ? -1 : 1;
    w.set_scale(i, sign * about * magnitude / largest);
  }
  return w;
}

}  // namespace moegemm::testing
