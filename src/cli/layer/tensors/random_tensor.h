#pragma once

#include <cstdint>
#include <functional>

#include "moegemm/tensor.h"

namespace moegemm::testing {
class Memory;
}

namespace moegemm::cli {

/// The float nearest to `value` among those `dtype` can hold (ties to even, as the hardware
/// rounds).
float round_to(DType dtype, float value);
/// Element `index` of host memory that holds `dtype`, as a double.
double load_element(const void* data, DType dtype, std::int64_t index);
/// Rounds `value` to `dtype` and stores it as element `index` of host memory.
void store_element(void* data, DType dtype, std::int64_t index, float value);

/// Values that are a function of their position: element i can be asked for without the tensor, so
/// the oracle needs no second copy of weights that may be tens of gigabytes.
class RandomTensor {
 public:
  /// Uniform in [-amplitude, amplitude), rounded to `dtype`.
  RandomTensor(std::uint64_t seed, DType dtype, float amplitude);

  DType dtype() const { return dtype_; }
  float at(std::int64_t index) const;

  /// Writes elements [0, count) to device memory, in parallel on the host's threads. `told` gets
  /// the number of each chunk of them, from 1, and how many there are.
  void fill(testing::Memory& memory, void* data, std::int64_t count,
            const std::function<void(int chunk, int chunks)>& told = {}) const;

 private:
  std::uint64_t seed_;
  DType dtype_;
  float amplitude_;
};

}  // namespace moegemm::cli
