#pragma once

#include "core/backend.h"

/// The three products as the plainest loops: one thread, double accumulation, one rounding. Slow,
/// and the oracle that every other backend is compared with.
namespace moegemm::cpu::reference {

void forward(const Problem& problem, const Operands& operands);
void dx(const Problem& problem, const Operands& operands);
void dw(const Problem& problem, const Operands& operands);

}  // namespace moegemm::cpu::reference
