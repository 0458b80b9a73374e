#pragma once

#include <cstdint>

#include "moegemm/tensor.h"

namespace moegemm::cuda::sm80 {

/// The bytes between two rows of tensor `name`. Kernels multiply row numbers by 32 bits: throws
/// kNotImplemented from 4 GiB on.
unsigned pitch_bytes(const char* name, std::int64_t stride, DType dtype);

}  // namespace moegemm::cuda::sm80
