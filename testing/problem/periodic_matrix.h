#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "testing/device/memory.h"
#include "testing/device/repeated_memory.h"

namespace moegemm::testing {

/// A matrix too large for the host, whose element i (row by row) is element i mod kPeriod of one
/// random block. kPeriod is whole pages, so that the CPU can map one block many times, and a prime
/// number of them: an offset that lost its upper bits, at 2^31 or at 2^32, lands on another value.
class PeriodicMatrix {
 public:
  static constexpr std::int64_t kPeriod = 1223 * std::int64_t{RepeatedMemory::kPageBytes};

  /// Not allocated before `allocate`: sizes can be asked for first.
  PeriodicMatrix(DType dtype, std::int64_t rows, std::int64_t cols, std::uint64_t seed);

  std::int64_t bytes() const { return rows_ * cols_ * size_bytes(dtype_); }
  void allocate(Memory& memory);
  void* data() const { return repeated_ ? repeated_->data() : buffer_.data(); }
  /// Decoded values of one row.
  std::vector<float> row(std::int64_t r) const;
  float at(std::int64_t r, std::int64_t c) const { return block_[(r * cols_ + c) % kPeriod]; }

 private:
  DType dtype_;
  std::int64_t rows_;
  std::int64_t cols_;
  std::vector<unsigned char> block_bytes_;
  std::vector<float> block_;
  std::unique_ptr<RepeatedMemory> repeated_;
  Buffer buffer_;  ///< where nothing can be mapped twice
};

}  // namespace moegemm::testing
