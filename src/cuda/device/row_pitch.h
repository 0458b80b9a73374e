#pragma once

#include <cstdint>

#include "cuda/device/host_device.h"

namespace moegemm::cuda {

/// The distance between two rows of an operand. Kernels find row r at (r * units) * unit_bytes: a
/// 32-bit product once, and one 32-bit multiply-add onto a 64-bit address for each copy.
struct RowPitch {
  unsigned unit_bytes;
  unsigned units;  ///< 1 unless rows are 4 GiB apart or more: there are then less than 2^25 of them

  MOEGEMM_HOST_DEVICE std::int64_t bytes() const { return std::int64_t{unit_bytes} * units; }
};

}  // namespace moegemm::cuda
