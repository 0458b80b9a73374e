#pragma once

#include <cuda_runtime_api.h>

#include "moegemm/ops.h"
#include "moegemm/tensor.h"

namespace moegemm::cuda {

/// moegemm::scale_rows on a GPU: a memset of `dot` and one launch; see include/moegemm/passes.h
/// for the meaning. The current device is the tensors'.
void launch_scale_rows(const TensorView& product, const TensorView& x, const RoutingView& routing,
                       const TensorView& scaled, const TensorView& dot, const TensorView& scaled_x,
                       cudaStream_t stream);

}  // namespace moegemm::cuda
