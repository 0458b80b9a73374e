#pragma once

#include <vector>

#include "core/backend.h"

namespace moegemm::cpu::reference {

/// What is stored of one row of a product, [features] -> [output columns]: its expert's bias is
/// added, then it is activated, as far as the problem asks for that.
std::vector<double> finished_row(const Problem& problem, const Operands& operands,
                                 std::int64_t expert, const std::vector<double>& product);

}  // namespace moegemm::cpu::reference
