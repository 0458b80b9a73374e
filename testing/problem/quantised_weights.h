#pragma once

#include <cstdint>
#include <vector>

#include "moegemm/quantization.h"
#include "testing/numerics/random.h"
#include "testing/problem/problem_case.h"

namespace moegemm::testing {

/// A quantised W as a checkpoint holds it.
struct QuantisedWeights {
  Quantization quantization;
  std::int64_t experts = 0, n = 0, k = 0;
  std::vector<unsigned char> values;  ///< packed
  std::vector<unsigned char> scales;

  /// W_e[row] in fp32, before it is rounded to the dtype of X: plain arithmetic, apart from the
  /// library's.
  std::vector<float> row(std::int64_t expert, std::int64_t row) const;
  float scale(std::int64_t index) const;
  /// Stores the scale of that type nearest to `value`, a NaN too.
  void set_scale(std::int64_t index, float value);
  std::int64_t scale_count() const { return experts * quantization.expert_scales(n, k); }
  /// The view of scales that lie there.
  ScalesView scales_view(const void* data, Device device) const;
};

/// Any values, and scales with which their products are about `magnitude`; with `extreme_scales`
/// any scale at all, infinities and NaN among them.
QuantisedWeights random_weights(const Quantization& quantization, std::int64_t experts,
                                std::int64_t n, std::int64_t k, float magnitude,
                                bool extreme_scales, Random& random);

}  // namespace moegemm::testing
