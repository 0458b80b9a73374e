#pragma once

#include "core/backend.h"

namespace moegemm::cpu::passes {

/// Sums of each expert's rows on the CPU, rows in order. Arguments are validated by the callers.
void expert_sums(const TensorView& rows, const RoutingView& routing, const TensorView& sums,
                 const ExecutionContext& context);

}  // namespace moegemm::cpu::passes
