#pragma once

#include <cstddef>

#include "core/planning/lower.h"
#include "core/validation/validate.h"

namespace moegemm {

/// Launches the steps of a plan, which was made for `call.problem`, one after the other. Nothing is
/// decided here. `workspace` has Plan::workspace_bytes on the device of the call.
void run_steps(const Planned& planned, const Call& call, std::byte* workspace,
               const ExecutionContext& context);

}  // namespace moegemm
