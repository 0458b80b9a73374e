#pragma once

#include <cstdint>

#include "cuda/device/host_device.h"

namespace moegemm::cuda {

/// n / divisor by one multiplication where that is exact for every n that occurs.
struct FastDivisor {
  std::uint32_t divisor = 1;
  std::uint32_t magic = 0;  ///< ceil(2^32 / divisor); 0: divide

  MOEGEMM_HOST_DEVICE std::uint32_t divide(std::uint32_t n) const {
    if (magic != 0) {
      return static_cast<std::uint32_t>(static_cast<std::uint64_t>(n) * magic >> 32);
    }
    return divisor == 1 ? n : n / divisor;
  }
};

/// For all n <= largest. With magic * divisor = 2^32 + e, 0 <= e < divisor, the product is too large
/// by n * e / (divisor * 2^32) of a quotient, which does not reach the next one while n * e < 2^32.
inline FastDivisor make_fast_divisor(std::uint32_t divisor, std::uint32_t largest) {
  if (divisor <= 1) return {};
  const std::uint64_t magic = ((std::uint64_t{1} << 32) + divisor - 1) / divisor;
  const std::uint64_t excess = magic * divisor - (std::uint64_t{1} << 32);
  const bool exact = excess * largest < (std::uint64_t{1} << 32);
  return {divisor, exact ? static_cast<std::uint32_t>(magic) : 0};
}

}  // namespace moegemm::cuda
