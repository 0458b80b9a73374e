#pragma once

#include "moegemm/kinds.h"

/// Whether results may depend on which kernel was chosen.
namespace moegemm {

/// Forward and dX are batch invariant: a row's bits depend on that row and its expert's weights
/// alone, because all kernels of a backend sum in one order. `set_batch_invariant(false)` lets the
/// planner take kernels that sum in an order of their own (KernelInfo::own_order), for all later
/// calls of this process; results stay deterministic. Returns what held before. It begins as
/// MOEGEMM_BATCH_INVARIANT says, which is on unless it is 0.
MOEGEMM_API bool set_batch_invariant(bool on);
MOEGEMM_API bool is_batch_invariant();

}  // namespace moegemm
