#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moegemm/tensor.h"

namespace moegemm::cuda {

/// gathered[r] = rows[gather_indices[r] / divisor], zeros for an index out of range; one launch.
/// The current device is the tensors'.
void launch_gather_rows(const TensorView& rows, const TensorView& gather_indices,
                        std::int64_t divisor, const TensorView& gathered, cudaStream_t stream);

}  // namespace moegemm::cuda
