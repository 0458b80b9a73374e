#pragma once

#include <cstdint>
#include <functional>

#include "moegemm/tensor.h"

namespace moegemm::testing {
class Memory;
}

namespace moegemm::cli {

/// Values that are a function of their position: element i can be asked for without the tensor, so
/// the oracle needs no second copy of weights that may be tens of gigabytes.
class RandomTensor {
 public:
  /// Uniform in [-amplitude, amplitude), rounded to `dtype`.
  RandomTensor(std::uint64_t seed, DType dtype, float amplitude);

  DType dtype() const { return dtype_; }
  float at(std::int64_t index) const;
  /// 64 random bits of that position.
  std::uint64_t bits(std::int64_t index) const;

  /// Writes elements [0, count) to device memory, in parallel on the host's threads. `told` gets
  /// the number of each chunk of them, from 1, and how many there are.
  void fill(testing::Memory& memory, void* data, std::int64_t count,
            const std::function<void(int chunk, int chunks)>& told = {}) const;

  /// The same with the first four million values over and over. A product's speed depends on its
  /// operands being random (zeros draw less power), not on them being all different, and a large
  /// layer has billions of weights.
  void fill_repeating(testing::Memory& memory, void* data, std::int64_t count) const;

 private:
  std::uint64_t seed_;
  DType dtype_;
  float amplitude_;
};

}  // namespace moegemm::cli
