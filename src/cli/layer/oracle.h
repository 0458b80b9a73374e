#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "moegemm/tensor.h"

namespace moegemm::testing {
class Memory;
}

namespace moegemm::cli {

/// What comparing one output with the oracle found.
struct CheckResult {
  double error = 0;      ///< ||out - expected|| / ||expected|| over the sampled elements
  double tolerance = 0;  ///< what `error` may reach
  std::int64_t elements = 0;
  std::string fault;  ///< empty when the check passed, else the first reason it did not

  bool passed() const { return fault.empty(); }
};

/// Collects sampled elements and judges them two ways: the norm of all errors against a tolerance,
/// and each error against the bound of its own dot product (testing/numerics/sum_bound.h).
class Comparison {
 public:
  /// `tolerance`: replaces the norm bound that follows from the dtype and the dot lengths.
  Comparison(DType out_dtype, std::optional<double> tolerance);

  /// `squares` is the sum of (a * b)^2 over the `terms` products that `expected` is the sum of.
  void add(std::int64_t row, std::int64_t col, double got, double expected, double squares,
           std::int64_t terms);
  CheckResult result() const;

 private:
  DType out_dtype_;
  std::optional<double> tolerance_;
  double error_squares_ = 0;
  double expected_squares_ = 0;
  std::int64_t elements_ = 0;
  std::int64_t most_terms_ = 0;
  std::string fault_;
};

/// One output row to recompute: out[row][col] = multiplier * sum over l of left[l] * right(col, l).
struct OracleRow {
  std::int64_t row = 0;
  std::vector<double> left;
  std::function<double(std::int64_t col, std::int64_t l)> right;
  double multiplier = 1;
};

/// At most `count` positions of [0, extent), evenly spread, both ends included.
std::vector<std::int64_t> spread(std::int64_t extent, std::int64_t count);

/// Recomputes rows of the device matrix `out` in double precision: every column when that is cheap,
/// else evenly spread ones.
CheckResult check_products(testing::Memory& memory, const TensorView& out,
                           const std::vector<OracleRow>& rows, std::optional<double> tolerance);

/// Row `row` of a device matrix, as doubles.
std::vector<double> read_row(testing::Memory& memory, const TensorView& matrix, std::int64_t row);

}  // namespace moegemm::cli
