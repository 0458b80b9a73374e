#pragma once

#include <cuda_runtime_api.h>

#include "moegemm/passes.h"

namespace moegemm::cuda {

/// moegemm::activate on a GPU, in one launch; see include/moegemm/passes.h for the meaning. The
/// current device is the tensors'.
void launch_activate(const TensorView& pre, const TensorView& bias, const TensorView& m_sizes,
                     const Activation& activation, const TensorView& act, cudaStream_t stream);

/// moegemm::activate_backward: one launch, behind a memset of d_weights if that is asked for.
void launch_activate_backward(const ActivationGradientInputs& inputs, const RoutingView& routing,
                              const Activation& activation,
                              const ActivationGradientOutputs& outputs, cudaStream_t stream);

}  // namespace moegemm::cuda
