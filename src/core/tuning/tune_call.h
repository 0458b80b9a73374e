#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/planner.h"
#include "core/tuning/race.h"
#include "core/validation/validate.h"
#include "moegemm/tune.h"

namespace moegemm {

/// The kernels of a backend that are worth timing for a problem, the heuristic's first, then by
/// predicted time.
struct TuneField {
  std::vector<int> kernels;               ///< positions in the backend's list
  std::vector<TuneCandidate> candidates;  ///< the same order; behind them, those left out and why
};
TuneField choose_field(const Backend& backend, const Problem& problem);

/// Times the field on `call` and says what became of each kernel. `launch` runs a plan.
TuneReport measure(const Backend& backend, const Call& call, TuneField field, Stopwatch& stopwatch,
                   TuningSupport& support, const std::function<void(const Plan&)>& launch);

/// Plans a call that nobody has measured, after measuring it if that is allowed here and now.
Planned tune_unknown(const Call& call, const GemmOptions& options, const ExecutionContext& context);

}  // namespace moegemm
