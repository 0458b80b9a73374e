#pragma once

#include <optional>

#include "core/backend.h"
#include "moegemm/config.h"
#include "moegemm/plan.h"
#include "moegemm/problem.h"

namespace moegemm {

/// Who runs a problem, and how.
struct Planned {
  const Backend* backend = nullptr;
  Plan plan;
};

/// Plans a validated problem, from a bounded cache when the same was asked before. `forced` and
/// `config` may be empty. Throws kNotImplemented, with every backend's reason, when nothing runs
/// it.
Planned plan_problem(const Problem& problem, const std::optional<BackendKind>& forced,
                     const std::optional<KernelConfig>& config);

}  // namespace moegemm
