#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moegemm/tensor.h"

namespace moegemm::cuda {

/// moegemm::combine and combine_with_bias on a GPU, usually in one launch, and a second one for the
/// last columns of aligned rows that do not fill 16 bytes; see include/moegemm/routing.h for the
/// meaning. The current device is the tensors'.
void launch_combine(const TensorView& rows, const TensorView& weights, std::int64_t topk,
                    const TensorView& bias, const TensorView& expert_ids, const TensorView& out,
                    cudaStream_t stream);

}  // namespace moegemm::cuda
