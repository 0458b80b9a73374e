#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moegemm/tensor.h"

namespace moegemm::cuda {

/// moegemm::combine on a GPU, usually in one launch, and a second one for the last columns of
/// aligned rows that do not fill 16 bytes; see include/moegemm/passes.h for the meaning. The
/// current device is the tensors'.
void launch_combine(const TensorView& rows, const TensorView& weights, std::int64_t topk,
                    const TensorView& out, cudaStream_t stream);

}  // namespace moegemm::cuda
