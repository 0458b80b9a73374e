#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moegemm/tensor.h"

namespace moegemm::cuda {

/// moegemm::combine or, with positions, combine_rows on a GPU, usually in one launch, and a second
/// one for the last columns of aligned rows that do not fill 16 bytes; see
/// include/moegemm/routing.h and compact.h for the meaning. The current device is the tensors'.
void launch_combine(const TensorView& rows, const TensorView& weights, const TensorView& positions,
                    std::int64_t topk, const TensorView& out, cudaStream_t stream);

}  // namespace moegemm::cuda
