#include "cpu/reference/epilogue.h"

#include "core/types/constant_of.h"
#include "cpu/activation_functions.h"
#include "cpu/element_type.h"

namespace moegemm::cpu::reference {
namespace {

double function_at(const Activation& activation, double g) {
  double value = 0;
  with_constant<kActivationFunctions>(activation.function, [&]<ActivationFunction F>() {
    value = Function<F>::exact(g, static_cast<double>(activation.alpha));
  });
  return value;
}

/// Comparisons that are false for NaN, which therefore stays.
double at_most(double value, double limit) { return value > limit ? limit : value; }
double at_least(double value, double limit) { return value < limit ? limit : value; }

std::vector<double> activated(const Activation& activation, const std::vector<double>& row) {
  const double limit = activation.limit;
  const auto columns =
      static_cast<std::size_t>(activation.activated_columns(static_cast<std::int64_t>(row.size())));
  const bool interleaved = activation.layout == GateLayout::kInterleaved;
  std::vector<double> act(columns);
  for (std::size_t c = 0; c < columns; ++c) {
    act[c] = function_at(activation, at_most(row[interleaved ? 2 * c : c], limit));
    if (!activation.gated()) continue;
    const double up = at_least(at_most(row[interleaved ? 2 * c + 1 : columns + c], limit), -limit);
    act[c] *= up + static_cast<double>(activation.up_offset);
  }
  return act;
}

}  // namespace

std::vector<double> finished_row(const Problem& problem, const Operands& operands,
                                 std::int64_t expert, const std::vector<double>& product) {
  std::vector<double> row = product;
  if (problem.bias) {
    for (std::size_t c = 0; c < row.size(); ++c) {
      row[c] += read_float(operands.bias, problem.dtype,
                           expert * operands.bias_stride + static_cast<std::int64_t>(c));
    }
  }
  return problem.activation ? activated(*problem.activation, row) : row;
}

}  // namespace moegemm::cpu::reference
