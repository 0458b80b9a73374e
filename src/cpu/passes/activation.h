#pragma once

#include "core/backend.h"

/// The activation between the two products on the CPU. Arguments are validated by the callers.
namespace moegemm::cpu::passes {

void activate(const TensorView& pre, const TensorView& bias, const TensorView& m_sizes,
              const Activation& activation, const TensorView& act, const ExecutionContext& context);

void activate_backward(const ActivationGradientInputs& inputs, const RoutingView& routing,
                       const Activation& activation, const ActivationGradientOutputs& outputs,
                       const ExecutionContext& context);

}  // namespace moegemm::cpu::passes
