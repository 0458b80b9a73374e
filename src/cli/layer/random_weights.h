#pragma once

#include <cstdint>
#include <functional>

#include "layer/random_tensor.h"
#include "moegemm/ops.h"
#include "moegemm/quantization.h"
#include "testing/device/device_tensor.h"

namespace moegemm::cli {

/// Weights in the memory of a device: an ordinary tensor, or packed values and their scales.
struct LayerWeights {
  testing::Buffer values;
  testing::Buffer scales;
  TensorView view;  ///< [E, N, K]
  Quantization quantization;
  ScalesView scales_view;

  /// The options of a call that reads them.
  GemmOptions with(GemmOptions options) const;
};

/// The [E, N, K] weights of a product, a function of their position as those of RandomTensor are,
/// quantised or not.
class RandomWeights {
 public:
  RandomWeights(const RandomTensor& plain, float amplitude, const Quantization& quantization,
                std::int64_t experts, std::int64_t n, std::int64_t k);

  /// Element `index` of [E, N, K], rounded to the dtype.
  float at(std::int64_t index) const;

  /// `told` is as in RandomTensor::fill.
  LayerWeights make(testing::Memory& memory, const ToldOfChunks& told = {}) const;

 private:
  std::uint8_t byte(std::int64_t index) const;
  float scale(std::int64_t index) const;

  RandomTensor plain_;
  float amplitude_;
  Quantization quantization_;
  std::int64_t experts_, n_, k_;
};

}  // namespace moegemm::cli
