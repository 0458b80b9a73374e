#pragma once

#include <cstdint>
#include <vector>

#include "support/problem/host_problem.h"

namespace moegemm::testing {

/// What one row of an output must be. For dW, rows are those of [E * N, K].
struct ExpectedRow {
  enum class Kind : std::uint8_t {
    kValues,   ///< `value` is the exact result
    kUnnamed,  ///< scattered output that no index names: the caller's data is at fault, nothing
               ///< stores there. Zero or untouched
  } kind = Kind::kValues;
  std::int64_t length = 0;      ///< terms of each sum
  double initial_scale = 0.0;   ///< 1 when the output is accumulated to
  std::vector<double> value;    ///< [cols]
  std::vector<double> squares;  ///< [cols]: sum of the squares of the terms
};

/// The definition, as plain loops in double precision, apart from all of the library's code.
void expect_row(const HostProblem& problem, std::int64_t row, ExpectedRow& expected);

/// Multiply-adds that expect_row spends on all rows.
double oracle_work(const HostProblem& problem);

}  // namespace moegemm::testing
