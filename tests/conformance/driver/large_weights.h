#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "moegemm/quantization.h"
#include "testing/device/memory.h"
#include "testing/device/repeated_memory.h"

namespace moegemm::testing {

/// Bytes of a device that repeat one block, gigabytes of them where the host has megabytes.
class PeriodicBytes {
 public:
  /// Whole pages and a prime number of them, for the reason that PeriodicMatrix gives.
  static constexpr std::int64_t kPeriod = 1223 * std::int64_t{RepeatedMemory::kPageBytes};

  explicit PeriodicBytes(std::int64_t bytes) : bytes_(bytes), block_(kPeriod) {}

  std::vector<unsigned char>& block() { return block_; }
  const std::vector<unsigned char>& block() const { return block_; }
  std::int64_t bytes() const { return bytes_; }
  void allocate(Memory& memory);
  void* data() const { return repeated_ ? repeated_->data() : buffer_.data(); }

 private:
  std::int64_t bytes_;
  std::vector<unsigned char> block_;
  std::unique_ptr<RepeatedMemory> repeated_;
  Buffer buffer_;  ///< where nothing can be mapped twice
};

/// A quantised W [E, N, K] whose packed values are beyond what a 32-bit offset reaches.
class LargeWeights {
 public:
  LargeWeights(const Quantization& quantization, std::int64_t experts, std::int64_t n,
               std::int64_t k, std::uint64_t seed);

  const Quantization& quantization() const { return quantization_; }
  std::int64_t bytes() const { return values_.bytes() + scales_.bytes(); }
  void allocate(Memory& memory);
  void* values() const { return values_.data(); }
  ScalesView scales(Device device) const;
  /// W_e[n, :] for row e * N + n of the stack, rounded to bf16 as the products round it.
  std::vector<float> row(std::int64_t row_of_stack) const;

 private:
  Quantization quantization_;
  std::int64_t experts_, n_, k_;
  PeriodicBytes values_, scales_;
  std::array<std::array<double, 2>, 256> decoded_;  ///< the one or two values in a byte
  std::vector<float> decoded_scales_;               ///< of one period
};

}  // namespace moegemm::testing
