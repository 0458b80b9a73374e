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

/// The plans that are worth timing for a problem, one for each kernel of a backend: kernel number
/// `first`, the heuristic's, then by predicted time of the product.
struct TuneField {
  std::vector<Plan> plans;
  std::vector<TuneCandidate> candidates;  ///< the same order; then those left out and why

  /// The most that any of them takes.
  std::int64_t workspace_bytes() const;
};
TuneField choose_field(const Backend& backend, const Problem& problem, int first,
                       WorkspaceUse workspace);

/// Times whole plans on the operands of `rotation`, a run on each set in turn, and says what became
/// of each kernel.
TuneReport measure(const Backend& backend, const Problem& problem, TuneField field,
                   OperandRotation& rotation, Stopwatch& stopwatch,
                   const ExecutionContext& context);

/// Plans a call that nobody has measured, after measuring it if that is allowed here and now.
Planned tune_unknown(const Call& call, const GemmOptions& options, const ExecutionContext& context);

/// In a child of fork(): whoever was measuring is not there.
void renew_tuning_turn();

}  // namespace moegemm
