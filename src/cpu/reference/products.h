#pragma once

#include "core/backend.h"

/// The three products as the plainest loops: one thread, double accumulation, one rounding. Slow,
/// and the oracle that every other backend is compared with.
namespace moegemm::cpu::reference {

void run(const Problem& problem, const Operands& operands);

}  // namespace moegemm::cpu::reference
