#include "layer/random_weights.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "moegemm/execution.h"
#include "testing/numerics/floats.h"
#include "testing/numerics/random.h"
#include "testing/numerics/weight_formats.h"

namespace moegemm::cli {

GemmOptions LayerWeights::with(GemmOptions options) const {
  options.quantization = quantization;
  options.w_scales = scales_view;
  return options;
}

RandomWeights::RandomWeights(const RandomTensor& plain, float amplitude,
                             const Quantization& quantization, std::int64_t experts, std::int64_t n,
                             std::int64_t k)
    : plain_(plain),
      amplitude_(amplitude),
      quantization_(quantization),
      experts_(experts),
      n_(n),
      k_(k) {}

std::uint8_t RandomWeights::byte(std::int64_t index) const {
  const auto bits = static_cast<std::uint8_t>(plain_.bits(index) >> 32);
  return std::isnan(testing::packed_value(quantization_.format, bits, false)) ? bits ^ 1 : bits;
}

float RandomWeights::scale(std::int64_t index) const {
  const double unit = static_cast<double>(plain_.bits(~index) >> 40) * 0x1p-24;
  const double most = amplitude_ / testing::made_format(quantization_.format).largest;
  std::uint32_t stored = 0;
  testing::encode_scale(quantization_.scale_type, &stored, 0,
                        static_cast<float>(most * (0.5 + unit)));
  return testing::decode_scale(quantization_.scale_type, &stored, 0);
}

float RandomWeights::at(std::int64_t index) const {
  if (quantization_.plain()) return plain_.at(index);
  const std::int64_t expert = index / (n_ * k_), place = index % (n_ * k_);
  const std::int64_t in_expert = quantization_.bits() == 8 ? place : place / 2;
  const double value = testing::packed_value(
      quantization_.format, byte(expert * quantization_.expert_bytes(n_, k_) + in_expert),
      place % 2 != 0);
  const std::int64_t of_expert = quantization_.scale_of(place / k_, place % k_, n_, k_);
  const float factor = scale(expert * quantization_.expert_scales(n_, k_) + of_expert);
  return testing::round_to(plain_.dtype(), static_cast<float>(value * static_cast<double>(factor)));
}

LayerWeights RandomWeights::make(testing::Memory& memory, const ToldOfChunks& told) const {
  LayerWeights weights;
  weights.quantization = quantization_;
  if (quantization_.plain()) {
    testing::DeviceTensor tensor = testing::make_stack(memory, plain_.dtype(), experts_, n_, k_);
    plain_.fill(memory, tensor.buffer.data(), tensor.view.numel(), told);
    weights.values = std::move(tensor.buffer);
    weights.view = tensor.view;
    return weights;
  }
  const std::int64_t bytes = experts_ * quantization_.expert_bytes(n_, k_);
  weights.values = testing::Buffer(memory, static_cast<std::size_t>(bytes));
  fill_in_chunks(memory, weights.values.data(), bytes, 1, told,
                 [this](void* host, std::int64_t begin, std::int64_t first, std::int64_t last) {
                   auto* values = static_cast<std::uint8_t*>(host);
                   for (std::int64_t i = first; i < last; ++i) values[i - begin] = byte(i);
                 });
  const std::int64_t scales = experts_ * quantization_.expert_scales(n_, k_);
  const int each = scale_bytes(quantization_.scale_type);
  std::vector<std::uint8_t> stored(static_cast<std::size_t>(scales * each));
  for (std::int64_t i = 0; i < scales; ++i) {
    testing::encode_scale(quantization_.scale_type, stored.data(), i, scale(i));
  }
  weights.scales = testing::Buffer(memory, stored.size());
  weights.scales.upload(stored.data());
  weights.view = TensorView::stack(weights.values.data(), plain_.dtype(), experts_, n_, k_, 0,
                                   memory.device());
  const bool flat = quantization_.format == WeightFormat::kNf4;
  const std::int64_t columns = quantization_.scale_columns(n_, k_);
  weights.scales_view = {weights.scales.data(),
                         quantization_.scale_type,
                         flat ? 2 : 3,
                         {experts_, flat ? columns : quantization_.scale_rows(n_), columns},
                         memory.device()};
  return weights;
}

}  // namespace moegemm::cli
