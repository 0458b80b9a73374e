#pragma once

#include <cstdint>

#include "cuda/device/host_device.h"

namespace moegemm::cuda {

/// n / divisor for 0 <= n < 2^31 by one multiplication and a shift: kernels divide many indices at
/// once, and a branch per index would serialise the loads they come from.
struct FastDivisor {
  std::uint32_t magic = std::uint32_t{1} << 31;
  int shift = 31;

  MOEGEMM_HOST_DEVICE std::uint32_t divide(std::uint32_t n) const {
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(n) * magic >> shift);
  }
};

/// `divisor` is 1 to 2^31. With 2^(log - 1) < divisor <= 2^log and shift = 31 + log, magic =
/// ceil(2^shift / divisor) is below 2^32 (2^31 for a power of two) and magic * divisor exceeds
/// 2^shift by e < divisor. The product n * magic / 2^shift is then too large by less than
/// n * e / (2^shift * divisor) < 1 / divisor, which never reaches the next quotient.
inline FastDivisor make_fast_divisor(std::uint32_t divisor) {
  int log = 0;
  while ((std::uint64_t{1} << log) < divisor) ++log;
  const int shift = 31 + log;
  const std::uint64_t power = std::uint64_t{1} << shift;
  return {static_cast<std::uint32_t>((power + divisor - 1) / divisor), shift};
}

}  // namespace moegemm::cuda
