#pragma once

#include <cstdint>

#include "cuda/device/host_device.h"

namespace moegemm::cuda {

/// n / divisor for n < 2^31 by one multiplication and no branch: kernels divide many indices at
/// once, and a branch per index would serialise the loads they come from.
struct FastDivisor {
  std::uint32_t divisor = 1;
  std::uint32_t magic = 1u << 31;  ///< ceil(2^31 / divisor)

  MOEGEMM_HOST_DEVICE std::uint32_t divide(std::uint32_t n) const {
    const auto quotient = static_cast<std::uint32_t>(static_cast<std::uint64_t>(n) * magic >> 31);
    // With magic * divisor = 2^31 + e, 0 <= e < divisor, the product is too large by n * e /
    // (divisor * 2^31) < 1, so the quotient is right or one too large.
    return quotient - (quotient * divisor > n ? 1 : 0);
  }
};

inline FastDivisor make_fast_divisor(std::uint32_t divisor) {
  if (divisor <= 1) return {};
  return {divisor, static_cast<std::uint32_t>(((std::uint64_t{1} << 31) + divisor - 1) / divisor)};
}

}  // namespace moegemm::cuda
