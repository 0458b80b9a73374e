#pragma once

#include <cstdint>
#include <functional>

#include "moegemm/tensor.h"

namespace moegemm::testing {
class Memory;
}

namespace moegemm::cli {

/// Gets the number of each chunk of elements that is made, from 1, and how many there are.
using ToldOfChunks = std::function<void(int chunk, int chunks)>;

/// Writes `count` elements of that size to device memory. `make` writes those from `first` up to
/// `last` to `host`, which has element `begin` at its start; it is called in parallel on the host's
/// threads.
void fill_in_chunks(testing::Memory& memory, void* data, std::int64_t count,
                    std::int64_t element_bytes, const ToldOfChunks& told,
                    const std::function<void(void* host, std::int64_t begin, std::int64_t first,
                                             std::int64_t last)>& make);

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

  /// Writes elements [0, count) to device memory.
  void fill(testing::Memory& memory, void* data, std::int64_t count,
            const ToldOfChunks& told = {}) const;

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
