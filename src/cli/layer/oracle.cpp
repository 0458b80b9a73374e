#include "layer/oracle.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "testing/device/memory.h"
#include "testing/numerics/floats.h"
#include "testing/numerics/sum_bound.h"

namespace moegemm::cli {

Comparison::Comparison(DType out_dtype, std::optional<double> tolerance)
    : out_dtype_(out_dtype), tolerance_(tolerance) {}

void Comparison::add(std::int64_t row, std::int64_t col, double got, double expected,
                     double squares, std::int64_t terms) {
  const double difference = std::fabs(got - expected);
  error_squares_ += difference * difference;
  expected_squares_ += expected * expected;
  most_terms_ = std::max(most_terms_, terms);
  ++elements_;
  const double bound = testing::sum_bound(out_dtype_, terms, expected, squares);
  if (fault_.empty() && !testing::is_close(got, expected, bound)) {
    fault_ =
        fmt::format("element [{}, {}]: {}", row, col, testing::difference(got, expected, bound));
  }
}

CheckResult Comparison::result() const {
  CheckResult result;
  result.elements = elements_;
  result.error = expected_squares_ > 0 ? std::sqrt(error_squares_ / expected_squares_)
                                       : std::sqrt(error_squares_);
  // One rounding to the output type, plus the random walk of fp32 roundings along the dot product
  // (4 standard deviations).
  result.tolerance = tolerance_.value_or(
      testing::unit_roundoff(out_dtype_) +
      4 * testing::kFp32Roundoff *
          std::sqrt(static_cast<double>(std::max<std::int64_t>(most_terms_, 1))));
  result.fault = fault_;
  const bool within = result.error <= result.tolerance;  // false for NaN
  if (!within && result.fault.empty()) {
    result.fault = fmt::format("relative error {:.3g} exceeds the tolerance {:.3g}", result.error,
                               result.tolerance);
  }
  return result;
}

std::vector<std::int64_t> spread(std::int64_t extent, std::int64_t count) {
  std::vector<std::int64_t> positions;
  count = std::min(extent, count);
  for (std::int64_t i = 0; i < count; ++i) {
    positions.push_back(count == 1 ? 0 : i * (extent - 1) / (count - 1));
  }
  return positions;
}

std::vector<double> read_row(testing::Memory& memory, const TensorView& matrix, std::int64_t row) {
  const std::int64_t cols = matrix.shape[static_cast<std::size_t>(matrix.rank - 1)];
  const std::int64_t row_bytes = matrix.row_stride * size_bytes(matrix.dtype);
  std::vector<std::byte> bytes(static_cast<std::size_t>(cols * size_bytes(matrix.dtype)));
  memory.copy_out(bytes.data(), static_cast<const std::byte*>(matrix.data) + row * row_bytes,
                  static_cast<std::int64_t>(bytes.size()));
  std::vector<double> values(static_cast<std::size_t>(cols));
  for (std::int64_t c = 0; c < cols; ++c) {
    values[static_cast<std::size_t>(c)] = testing::decode(matrix.dtype, bytes.data(), c);
  }
  return values;
}

CheckResult check_products(testing::Memory& memory, const TensorView& out,
                           const std::vector<OracleRow>& rows, std::optional<double> tolerance) {
  // About a quarter of a second of double-precision products per operation.
  constexpr std::int64_t kProductBudget = std::int64_t{1} << 25;
  std::int64_t terms = 1;
  for (const OracleRow& row : rows) terms += static_cast<std::int64_t>(row.left.size());
  const std::int64_t cols = out.shape[static_cast<std::size_t>(out.rank - 1)];
  const auto sampled_cols = spread(cols, std::max<std::int64_t>(2, kProductBudget / terms));

  Comparison comparison(out.dtype, tolerance);
  for (const OracleRow& row : rows) {
    const std::vector<double> got = read_row(memory, out, row.row);
    for (const std::int64_t col : sampled_cols) {
      double sum = 0;
      double squares = 0;
      for (std::size_t l = 0; l < row.left.size(); ++l) {
        const double product =
            row.multiplier * row.left[l] * row.right(col, static_cast<std::int64_t>(l));
        sum += product;
        squares += product * product;
      }
      comparison.add(row.row, col, got[static_cast<std::size_t>(col)], sum, squares,
                     static_cast<std::int64_t>(row.left.size()));
    }
  }
  return comparison.result();
}

}  // namespace moegemm::cli
