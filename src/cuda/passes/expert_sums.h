#pragma once

#include <cuda_runtime_api.h>

#include "moegemm/ops.h"

namespace moegemm::cuda {

/// moegemm::expert_sums on a GPU, in one launch; see include/moegemm/passes.h for the meaning.
/// The current device is the tensors'.
void launch_expert_sums(const TensorView& rows, const RoutingView& routing, const TensorView& sums,
                        cudaStream_t stream);

}  // namespace moegemm::cuda
