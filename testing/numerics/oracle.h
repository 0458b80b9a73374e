#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "testing/problem/host_problem.h"

namespace moegemm::testing {

/// What one row of an output must be. For dW, rows are those of [E * N, K].
struct ExpectedRow {
  std::int64_t length = 0;      ///< terms of each sum
  double initial_scale = 0.0;   ///< 1 when the output is accumulated to
  std::vector<double> value;    ///< [cols]: the exact result
  std::vector<double> squares;  ///< [cols]: sum of the squares of the terms
  bool activated = false;       ///< `value` is after an activation, `product` before it
  std::vector<double> bare;     ///< [features]: the product without its bias
  std::vector<double> product;  ///< [features], with its own `squares`
};

/// The definition, as plain loops in double precision, apart from all of the library's code. Where
/// several positions name a row of the output, it is that of the `choice`-th of them.
void expect_row(const HostProblem& problem, std::int64_t row, ExpectedRow& expected,
                std::size_t choice = 0);

/// The definition of an activation of one column of a product in double precision.
double activation_at(const Activation& activation, double gate, double up);
/// Where column `c` of `cols` activated ones has its gate and its up.
std::int64_t gate_column(const Activation& activation, std::int64_t c);
std::int64_t up_column(const Activation& activation, std::int64_t cols, std::int64_t c);

/// Multiply-adds that expect_row spends on all rows.
double oracle_work(const HostProblem& problem);

}  // namespace moegemm::testing
