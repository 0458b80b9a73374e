#include "testing/numerics/oracle.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace moegemm::testing {
namespace {

constexpr int kLanes = 8;  // independent sums, so that the compiler may use vector registers

// The loops that take most of a run of the conformance suite, for the machine that runs it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MOEGEMM_FOR_THIS_CPU __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define MOEGEMM_FOR_THIS_CPU
#endif

/// One position of Y: the dot products of its row of X with every row of W_e.
MOEGEMM_FOR_THIS_CPU void forward_position(const HostProblem& p, std::int64_t position,
                                           ExpectedRow& expected) {
  const std::int64_t expert = p.owners[position];
  const std::int64_t x_row = p.x_row(position);
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
    expected.value[n] = sum;
    expected.squares[n] = square;
  }
}

/// out[c] += factor * row[c]. Rounding the factor to a dtype whose normal numbers begin at `floor`
/// moves a smaller one as far as it moves that; where it is the row that is rounded, a term counts
/// for `least` at least.
MOEGEMM_FOR_THIS_CPU void add_scaled(double factor, const float* row, ExpectedRow& expected,
                                     double floor = 0.0, double least = 0.0) {
  const double error_factor = std::max(std::fabs(factor), floor);
  double* value = expected.value.data();
  double* squares = expected.squares.data();
  const std::int64_t cols = static_cast<std::int64_t>(expected.value.size());
  for (std::int64_t c = 0; c < cols; ++c) {
    const double element = row[c];
    value[c] += factor * element;
    const double error = std::max(error_factor * std::fabs(element), least);
    squares[c] += error * error;
  }
}

/// One position of dX: its row of dY times W_e.
void dx_position(const HostProblem& p, std::int64_t position, ExpectedRow& expected) {
  const std::int64_t expert = p.owners[position];
  const std::int64_t dy_row = p.dy_row(position);
  if (expert < 0 || dy_row < 0) return;
  expected.length = p.spec.n;
  for (std::int64_t n = 0; n < p.spec.n; ++n) {
    add_scaled(p.dy.row(dy_row)[n], p.w.row(expert * p.spec.n + n), expected);
  }
}

/// What the low-rank part adds to a position of either.
void add_low_rank(const HostProblem& p, std::int64_t position, ExpectedRow& expected) {
  const std::int64_t expert = p.owners[position], rank = p.spec.low_rank;
  if (expert < 0) return;
  expected.length += rank;
  const float* row = p.low_rows.row(position);
  for (std::int64_t j = 0; p.op == Op::kDx && j < rank; ++j) {
    add_scaled(row[j], p.low_weights.row(expert * rank + j), expected);
  }
  for (std::int64_t n = 0; p.op == Op::kForward && n < p.spec.n; ++n) {
    const float* w = p.low_weights.row(expert * p.spec.n + n);
    for (std::int64_t j = 0; j < rank; ++j) {
      const double term = static_cast<double>(row[j]) * static_cast<double>(w[j]);
      expected.value[n] += term;
      expected.squares[n] += term * term;
    }
  }
}

/// Bias, router weight and activation of a position's product.
void finish_position(const HostProblem& p, std::int64_t position, ExpectedRow& expected) {
  const std::int64_t expert = p.owners[position];
  if (expert < 0) {
    if (p.spec.activation) expected.value.resize(p.out.cols);
    return;
  }
  if (p.spec.activation) expected.bare = expected.value;
  if (p.spec.bias) {
    ++expected.length;
    add_scaled(1.0, p.bias.row(expert), expected);
  }
  if (const double scale = p.scale(position); scale != 1) {
    for (double& value : expected.value) value *= scale;
    for (double& square : expected.squares) square *= scale * scale;
  }
  if (!p.spec.activation) return;
  const Activation& activation = *p.spec.activation;
  expected.activated = true;
  expected.product = std::exchange(expected.value, std::vector<double>(p.out.cols));
  for (std::int64_t c = 0; c < p.out.cols; ++c) {
    expected.value[c] = activation_at(
        activation, expected.product[gate_column(activation, c)],
        activation.gated() ? expected.product[up_column(activation, p.out.cols, c)] : 0.0);
  }
}

/// Row n of dW_e: the segment's rows of X, each times its element n of dY.
void dw_row(const HostProblem& p, std::int64_t row, ExpectedRow& expected) {
  const std::int64_t expert = row / p.spec.n;
  const std::int64_t n = row % p.spec.n;
  expected.length = p.sizes[expert];
  const double floor = p.spec.multiply ? least_normal(p.dtype) : 0.0;
  for (std::int64_t r = p.begins[expert]; r < p.begins[expert] + p.sizes[expert]; ++r) {
    if (p.x_row(r) < 0 || p.dy_row(r) < 0) continue;
    const double dy = p.dy.row(p.dy_row(r))[n];
    add_scaled(p.scale(r) * dy, p.x.row(p.x_row(r)), expected, floor, floor * std::fabs(dy));
  }
}

}  // namespace

void expect_row(const HostProblem& p, std::int64_t row, ExpectedRow& expected, std::size_t choice) {
  expected.length = 0;
  expected.activated = false;
  const std::int64_t features = p.op == Op::kDw ? p.out.cols : p.spec.features(p.op);
  expected.value.assign(features, 0.0);
  expected.squares.assign(features, 0.0);
  if (p.op == Op::kDw) {
    dw_row(p, row, expected);
    expected.initial_scale = p.spec.accumulate ? 1.0 : 0.0;
    return;
  }
  std::int64_t position = row;
  if (p.scatters()) {
    if (p.positions_of[row].empty()) return;  // a row that nobody names is zero
    position = p.positions_of[row][choice];
  }
  if (p.op == Op::kForward) {
    forward_position(p, position, expected);
  } else {
    dx_position(p, position, expected);
  }
  if (p.spec.low_rank > 0) add_low_rank(p, position, expected);
  finish_position(p, position, expected);
}

double activation_at(const Activation& a, double gate, double up) {
  const double limit = a.limit;
  const double g = gate > limit ? limit : gate;  // NaN stays
  double value = g < 0 ? 0.0 : g * g;
  switch (a.function) {
    case ActivationFunction::kSilu:
      value = g / (1 + std::exp(-static_cast<double>(a.alpha) * g));
      break;
    case ActivationFunction::kGelu:
      value = 0.5 * g * std::erfc(-g / std::sqrt(2.0));
      break;
    case ActivationFunction::kGeluTanh:
      // (1 + tanh y) / 2 without the cancellation.
      value = g / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
      break;
    case ActivationFunction::kRelu2:
      break;
    case ActivationFunction::kRelu:
      value = g < 0 ? 0.0 : g;
      break;
  }
  if (!a.gated()) return value;
  const double u = up > limit ? limit : up < -limit ? -limit : up;
  return value * (u + static_cast<double>(a.up_offset));
}

std::int64_t gate_column(const Activation& a, std::int64_t c) {
  return a.layout == GateLayout::kInterleaved ? 2 * c : c;
}

std::int64_t up_column(const Activation& a, std::int64_t cols, std::int64_t c) {
  return a.layout == GateLayout::kInterleaved ? 2 * c + 1 : cols + c;
}

double oracle_work(const HostProblem& p) {
  return static_cast<double>(p.begins.back()) * static_cast<double>(p.spec.n) *
         static_cast<double>(p.spec.k);
}

}  // namespace moegemm::testing
