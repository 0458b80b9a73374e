#pragma once

#include "cuda/device/host_device.h"

namespace moegemm::cuda {

/// The 128-byte swizzle of TMA and wgmma: byte offset of 16-byte chunk `chunk` (0..7) of row `row`
/// in rows of 128 bytes. The tile's base is 1024-byte aligned.
MOEGEMM_HOST_DEVICE constexpr int swizzle_128b(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

}  // namespace moegemm::cuda
