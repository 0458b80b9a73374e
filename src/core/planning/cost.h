#pragma once

#include "moegemm/plan.h"

namespace moegemm {

/// What `kernel`, which must be feasible, should take for `problem`.
CostEstimate estimate_cost(const Problem& problem, const KernelInfo& kernel,
                           const MachineLimits& limits);

}  // namespace moegemm
