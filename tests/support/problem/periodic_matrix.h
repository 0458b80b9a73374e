#pragma once

#include <cstdint>
#include <vector>

#include "support/device/memory.h"

namespace moegemm::testing {

/// A matrix too large for the host, whose element i (row by row) is element i mod kPeriod of one
/// random block. kPeriod is prime: an offset that lost its upper bits, at 2^31 or at 2^32, lands on
/// another value, and rows differ from each other.
class PeriodicMatrix {
 public:
  static constexpr std::int64_t kPeriod = 4'999'999;

  /// Not allocated before `allocate`: sizes can be asked for first.
  PeriodicMatrix(DType dtype, std::int64_t rows, std::int64_t cols, std::uint64_t seed);

  std::int64_t bytes() const { return rows_ * cols_ * size_bytes(dtype_); }
  void allocate(Memory& memory);
  void* data() const { return buffer_.data(); }
  /// Decoded values of one row.
  std::vector<float> row(std::int64_t r) const;
  float at(std::int64_t r, std::int64_t c) const { return block_[(r * cols_ + c) % kPeriod]; }

 private:
  DType dtype_;
  std::int64_t rows_;
  std::int64_t cols_;
  std::vector<unsigned char> block_bytes_;
  std::vector<float> block_;
  Buffer buffer_;
};

}  // namespace moegemm::testing
