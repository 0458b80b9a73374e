#pragma once

#include "moegemm/execution.h"
#include "moegemm/ops.h"
#include "moegemm/problem.h"

namespace moegemm {

/// Throws Error for the first fault in m_sizes, and in the indices if this problem reads them.
void check_routing(const Problem& problem, RoutingView routing, const ExecutionContext& context);

}  // namespace moegemm
