#include "support/numerics/oracle.h"

namespace moegemm::testing {
namespace {

constexpr int kLanes = 8;  // independent sums, so that the compiler may use vector registers

/// One position of Y: the dot products of its row of X with every row of W_e.
void forward_position(const HostProblem& p, std::int64_t position, ExpectedRow& expected) {
  const std::int64_t expert = p.owners[position];
  const std::int64_t x_row = p.x_row(position);
  const double scale = p.scale(position);
  if (expert < 0 || x_row < 0) return;
  const std::int64_t depth = p.spec.k;
  expected.length = depth;
  const float* x = p.x.row(x_row);
  for (std::int64_t n = 0; n < p.spec.n; ++n) {
    const float* w = p.w.row(expert * p.spec.n + n);
    double sums[kLanes] = {};
    double squares[kLanes] = {};
    std::int64_t k = 0;
    for (; k + kLanes <= depth; k += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const double term = static_cast<double>(x[k + lane]) * static_cast<double>(w[k + lane]);
        sums[lane] += term;
        squares[lane] += term * term;
      }
    }
    for (; k < depth; ++k) {
      const double term = static_cast<double>(x[k]) * static_cast<double>(w[k]);
      sums[0] += term;
      squares[0] += term * term;
    }
    double sum = 0;
    double square = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      sum += sums[lane];
      square += squares[lane];
    }
    expected.value[n] = scale * sum;
    expected.squares[n] = scale * scale * square;
  }
}

/// out[c] += factor * row[c]
void add_scaled(double factor, const float* row, ExpectedRow& expected) {
  double* value = expected.value.data();
  double* squares = expected.squares.data();
  const std::int64_t cols = static_cast<std::int64_t>(expected.value.size());
  for (std::int64_t c = 0; c < cols; ++c) {
    const double term = factor * static_cast<double>(row[c]);
    value[c] += term;
    squares[c] += term * term;
  }
}

/// One position of dX: its row of dY times W_e.
void dx_position(const HostProblem& p, std::int64_t position, ExpectedRow& expected) {
  const std::int64_t expert = p.owners[position];
  const std::int64_t dy_row = p.dy_row(position);
  if (expert < 0 || dy_row < 0) return;
  expected.length = p.spec.n;
  const double scale = p.scale(position);
  for (std::int64_t n = 0; n < p.spec.n; ++n) {
    add_scaled(scale * p.dy.row(dy_row)[n], p.w.row(expert * p.spec.n + n), expected);
  }
}

/// Row n of dW_e: the segment's rows of X, each times its element n of dY.
void dw_row(const HostProblem& p, std::int64_t row, ExpectedRow& expected) {
  const std::int64_t expert = row / p.spec.n;
  const std::int64_t n = row % p.spec.n;
  expected.length = p.sizes[expert];
  for (std::int64_t r = p.begins[expert]; r < p.begins[expert + 1]; ++r) {
    if (p.x_row(r) < 0 || p.dy_row(r) < 0) continue;
    add_scaled(p.scale(r) * p.dy.row(p.dy_row(r))[n], p.x.row(p.x_row(r)), expected);
  }
}

}  // namespace

void expect_row(const HostProblem& p, std::int64_t row, ExpectedRow& expected) {
  expected.kind = ExpectedRow::Kind::kValues;
  expected.length = 0;
  expected.value.assign(p.out.cols, 0.0);
  expected.squares.assign(p.out.cols, 0.0);
  if (p.op == Op::kDw) {
    dw_row(p, row, expected);
    expected.initial_scale = p.spec.accumulate ? 1.0 : 0.0;
    return;
  }
  const std::int64_t position = p.scatters() ? p.position_of[row] : row;
  if (position < 0) {
    expected.kind = ExpectedRow::Kind::kUnnamed;
  } else if (p.op == Op::kForward) {
    forward_position(p, position, expected);
  } else {
    dx_position(p, position, expected);
  }
}

double oracle_work(const HostProblem& p) {
  return static_cast<double>(p.begins.back()) * static_cast<double>(p.spec.n) *
         static_cast<double>(p.spec.k);
}

}  // namespace moegemm::testing
