#pragma once

#include <string>
#include <vector>

#include "core/backend.h"
#include "core/planning/planner.h"
#include "core/tuning/measure/operand_rotation.h"
#include "core/tuning/measure/race.h"
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

/// Times the field on the operands of `rotation`, a launch on each set in turn, and says what
/// became of each kernel.
TuneReport measure(const Backend& backend, const Problem& problem, TuneField field,
                   OperandRotation& rotation, Stopwatch& stopwatch,
                   const ExecutionContext& context);

/// Plans a call that nobody has measured, after measuring it if that is allowed here and now.
Planned tune_unknown(const Call& call, const GemmOptions& options, const ExecutionContext& context);

}  // namespace moegemm
