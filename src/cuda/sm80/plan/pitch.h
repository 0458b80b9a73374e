#pragma once

#include <cstdint>

#include "cuda/device/row_pitch.h"
#include "moegemm/tensor.h"

namespace moegemm::cuda::sm80 {

/// The pitch of tensor `name`, whose rows are `stride` elements apart. Throws kNotImplemented where
/// no unit of less than 4 GiB divides it into at most 16: beyond 64 GiB if rows are aligned to 16
/// bytes, beyond 4 GiB times the element size whatever the alignment.
RowPitch row_pitch(const char* name, std::int64_t stride, DType dtype);

}  // namespace moegemm::cuda::sm80
