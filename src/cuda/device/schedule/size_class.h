#pragma once

#include "cuda/device/host_device.h"

namespace moegemm::cuda {

/// Classes of sizes, two per power of two: fine enough for balance, and as many as a warp has
/// lanes.
constexpr int kSizeClasses = 32;

/// The class of a size: grows with it; sizes in one class differ by less than a factor of 1.5.
/// Sizes from 2^16 on share the last class.
MOEGEMM_HOST_DEVICE int size_class(int size) {
  if (size >= 1 << 16) return kSizeClasses - 1;
  int power = 0;
  while (size >> (power + 1) > 0) ++power;
  return 2 * power + (power > 0 ? size >> (power - 1) & 1 : 0);
}

}  // namespace moegemm::cuda
