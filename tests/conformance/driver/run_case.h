#pragma once

#include <cstdint>

#include "conformance/driver/targets.h"
#include "moegemm/problem.h"
#include "testing/problem/problem_case.h"

namespace moegemm::testing {

/// Builds the case from `seed`, runs it on the target's backend, and expects every element right,
/// every other byte untouched. Skips when the backend refuses and may.
void expect_conformance(const Target& target, const ProblemCase& problem, Op op, DType dtype,
                        std::uint64_t seed, std::int64_t row_limit = 0);

}  // namespace moegemm::testing
