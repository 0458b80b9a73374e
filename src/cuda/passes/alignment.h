#pragma once

#include <cstdint>

#include "moegemm/tensor.h"

namespace moegemm::cuda {

/// Every row of a matrix starts at a multiple of 16 bytes.
inline bool is_16_byte_aligned(const TensorView& matrix) {
  const auto address = reinterpret_cast<std::uintptr_t>(matrix.data);
  return address % 16 == 0 && matrix.row_stride * size_bytes(matrix.dtype) % 16 == 0;
}

}  // namespace moegemm::cuda
