#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "conformance/passes/activation_cases.h"
#include "conformance/passes/row_checks.h"
#include "conformance/suites.h"
#include "moegemm/passes.h"
#include "testing/device/device_vector.h"
#include "testing/numerics/oracle.h"
#include "testing/problem/problem_case.h"

namespace moegemm::testing {
namespace {

/// fp32 roundings (and, on a GPU, approximated exponentials) of one element: 2 + 1.16 |x| ulps for
/// the exponential of x, and x stays below 20 here.
constexpr double kElementError = 64 * kFp32Roundoff;

/// The definition, in double.
struct Exact {
  double act, d_gate, d_up;
};

/// The derivative as a central difference of the definition, which needs no second formula. With
/// h = 1e-5 it is off by h^2 / 6 times a third derivative of at most a few units, and by 1e-16 / h.
double slope_at(const Activation& function, double g) {
  constexpr double kStep = 1e-5;
  if (function.function == ActivationFunction::kRelu && std::fabs(g) < kStep) return g > 0 ? 1 : 0;
  return (activation_at(function, g + kStep, 0) - activation_at(function, g - kStep, 0)) /
         (2 * kStep);
}
constexpr double kDifferenceError = 1e-9;

Exact exact(const Activation& a, double gate, double up) {
  const Activation function = {
      .function = a.function, .layout = GateLayout::kNone, .alpha = a.alpha};
  const double limit = a.limit;
  const double g = std::min(gate, limit);
  const double f = activation_at(function, g, 0);
  const double slope = gate > limit ? 0.0 : slope_at(function, g);
  if (!a.gated()) return {f, slope, 0.0};
  const double factor = std::clamp(up, -limit, limit) + static_cast<double>(a.up_offset);
  return {activation_at(a, gate, up), slope * factor, std::fabs(up) > limit ? 0.0 : f};
}

/// How far an activation may be off: its own roundings and those of its inputs.
double error_of(const Exact& e, double gate, double up) {
  return kElementError * (std::fabs(e.act) + std::fabs(gate * e.d_gate) + std::fabs(up * e.d_up));
}

/// A case's tensors on the host.
struct HostActivation {
  HostProblem routing;
  HostMatrix pre, bias, d_act, d_out, down_bias;

  bool used(std::int64_t r) const { return routing.owners[r] >= 0 && routing.index_valid(r); }
  double pre_at(const ActivationCase& c, std::int64_t r, std::int64_t col) const {
    return static_cast<double>(pre.row(r)[col]) +
           (c.bias ? static_cast<double>(bias.row(routing.owners[r])[col]) : 0.0);
  }
};

HostActivation build(const ActivationCase& c, DType dtype) {
  ProblemCase spec;  // builds segments and indices
  spec.name = c.name;
  spec.m_sizes = c.m_sizes;
  spec.starts = c.starts;
  spec.rows = c.rows;
  spec.n = spec.k = 1;
  spec.topk = c.topk;
  spec.permutation = Permutation::kY;
  spec.multiply = c.weighted;
  spec.slots = c.slots;
  spec.bad_indices = c.bad_indices;
  HostActivation host;
  host.routing = build_problem(spec, Op::kForward, dtype, seed_from(c.name) + run_seed());
  if (c.by_row)
    std::iota(host.routing.gather_indices.begin(), host.routing.gather_indices.end(), 0);
  Random random(seed_from(c.name) + run_seed());
  const std::int64_t experts = spec.experts(), inputs = c.activation.input_columns(c.cols);
  host.pre = random_matrix(dtype, c.rows, inputs, c.padding, 0, random);
  for (std::int64_t r = 0; r < c.rows; ++r) {
    for (std::int64_t col = 0; col < inputs; ++col) {
      host.pre.set(r, col, c.scale * host.pre.row(r)[col]);
    }
  }
  host.bias = random_matrix(dtype, experts, inputs, c.padding, 0, random);
  const DType d_act_dtype = c.fp32_d_act ? DType::kFloat32 : dtype;
  host.d_act = random_matrix(d_act_dtype, c.rows, c.cols, c.padding, 0, random);
  host.d_out = random_matrix(dtype, spec.tokens(), c.hidden, c.padding, 0, random);
  host.down_bias = random_matrix(dtype, experts, c.hidden, c.padding, 0, random);
  for (std::int64_t r = 0; c.nan_tail && r < c.rows; ++r) {
    if (host.routing.owners[r] >= 0) continue;
    host.pre.set(r, 0, kNan);
    host.d_act.set(r, c.cols - 1, kInf);
  }
  return host;
}

/// The segments of a case, with starts where it has some.
RoutingView segments_of(const ActivationCase& c, const DeviceVector& sizes,
                        const DeviceVector& starts) {
  RoutingView routing{sizes.view(), {}, {}, c.topk};
  if (!c.starts.empty()) routing.starts = starts.view();
  routing.tails = c.tails;
  routing.expected_rows = c.expected_rows;
  return routing;
}

/// Whether a row must be as it was, which it is then expected to be.
bool is_left_alone(const ActivationCase& c, const HostProblem& p, std::int64_t r,
                   const HostMatrix& blank, const std::vector<unsigned char>& bytes) {
  if (p.owners[r] >= 0 || c.tails == Tails::kZero) return false;
  for (std::int64_t col = 0; col < blank.cols; ++col) {
    EXPECT_TRUE(is_poison(blank.dtype, bytes.data(), blank.position(r, col)))
        << "row " << r << " is outside every segment, yet it was stored to";
  }
  return true;
}

void expect_activate(const RowTarget& target, const ActivationCase& c, DType dtype) {
  Memory& memory = *target.memory;
  const HostActivation host = build(c, dtype);
  const DType out_dtype = c.fp32_output ? DType::kFloat32 : dtype;
  const HostMatrix blank = poisoned_matrix(out_dtype, c.rows, c.cols, c.padding, 0);
  const DeviceMatrix pre(memory, host.pre), bias(memory, host.bias), act(memory, blank);
  const DeviceVector sizes(memory, c.index_dtype, c.m_sizes);
  const DeviceVector weights(memory, host.routing.weights_dtype, host.routing.router_weights);
  const DeviceVector starts(memory, c.index_dtype, c.starts);
  RoutingView routing = segments_of(c, sizes, starts);
  if (c.by_row) routing.router_weights = weights.view();
  activate(pre.view(), c.bias ? bias.view() : TensorView{}, routing, c.activation, act.view(),
           memory.context());
  memory.synchronize();

  const std::vector<unsigned char> bytes = act.download();
  for (std::int64_t r = 0; r < c.rows; ++r) {
    if (is_left_alone(c, host.routing, r, blank, bytes)) continue;
    for (std::int64_t col = 0; col < c.cols; ++col) {
      double want = 0, bound = 0;
      if (host.routing.owners[r] >= 0) {
        const double gate = host.pre_at(c, r, gate_column(c.activation, col));
        const double up =
            c.activation.gated() ? host.pre_at(c, r, up_column(c.activation, c.cols, col)) : 0.0;
        const Exact e = exact(c.activation, gate, up);
        const double weight = c.by_row ? host.routing.router_weights[r] : 1.0;
        want = weight * e.act;
        bound = std::fabs(weight) * error_of(e, gate, up);
        bound += half_ulp(out_dtype, std::fabs(want) + bound);
      }
      if (!expect_close(out_dtype, bytes, blank.position(r, col), want, bound, {"act", r, col})) {
        return;
      }
    }
  }
  expect_untouched_padding(blank, bytes);
  EXPECT_TRUE(act.guards_intact());
}

/// What a backward leaves, compared row by row; the sums of slots are collected on the way.
class BackwardCheck {
 public:
  BackwardCheck(const ActivationCase& c, const HostActivation& host, const HostMatrix& blank_pre,
                const HostMatrix& blank_act)
      : c_(c),
        host_(host),
        blank_pre_(blank_pre),
        blank_act_(blank_act),
        dots_(host.routing.spec.flat_rows(), 0.0),
        squares_(dots_),
        slack_(dots_) {}

  bool expect_row(std::int64_t r, const std::vector<unsigned char>& d_pre,
                  const std::vector<unsigned char>& act) {
    if (is_left_alone(c_, host_.routing, r, blank_pre_, d_pre)) return true;
    for (std::int64_t col = 0; col < c_.cols; ++col) {
      if (!expect_element(r, col, d_pre, act)) return false;
    }
    if (host_.used(r) && c_.down_bias) add_share_of_bias(r);
    return true;
  }

  bool expect_d_weights(const std::vector<unsigned char>& bytes) const {
    for (std::size_t i = 0; i < dots_.size(); ++i) {
      const double bound =
          slack_[i] + sum_bound(DType::kFloat32, c_.cols + c_.hidden, dots_[i], squares_[i]);
      const auto slot = static_cast<std::int64_t>(i);
      if (!expect_close(DType::kFloat32, bytes, slot, dots_[i], bound, {"d_weights", slot, 0})) {
        return false;
      }
    }
    return true;
  }

 private:
  bool expect_element(std::int64_t r, std::int64_t col, const std::vector<unsigned char>& d_pre,
                      const std::vector<unsigned char>& act) {
    const Activation& activation = c_.activation;
    const std::int64_t gate_at = gate_column(activation, col);
    const std::int64_t up_at = up_column(activation, c_.cols, col);
    Exact e = {};
    double gate = 0, up = 0, gradient = 0;
    if (host_.used(r)) {
      gate = host_.pre_at(c_, r, gate_at);
      up = activation.gated() ? host_.pre_at(c_, r, up_at) : 1.0;
      e = exact(activation, gate, up);
      gradient = host_.d_act.row(r)[col];
      const std::int64_t slot = host_.routing.gather_indices[r];
      slack_[slot] += std::fabs(gradient) * error_of(e, gate, up);
      add_term(slot, gradient * e.act);
    }
    const double weight = host_.used(r) && c_.weighted ? host_.routing.scale(r) : 1.0;
    const double scale = std::fabs(weight * gradient);
    const double factor = 1 + std::fabs(up) + std::fabs(static_cast<double>(activation.up_offset));
    const double inputs = (1 + std::fabs(gate)) * kElementError;
    const double gate_error = scale * factor * ((2 + std::fabs(gate)) * inputs + kDifferenceError);
    const double up_error = scale * (1 + std::fabs(gate)) * inputs;
    const double act_error = std::fabs(weight) * error_of(e, gate, up);
    return expect(blank_pre_, d_pre, r, gate_at, weight * gradient * e.d_gate, gate_error,
                  "d_gate") &&
           (!activation.gated() ||
            expect(blank_pre_, d_pre, r, up_at, weight * gradient * e.d_up, up_error, "d_up")) &&
           (!c_.with_weighted_act || expect(c_.in_place ? host_.d_act : blank_act_, act, r, col,
                                            weight * e.act, act_error, "weighted_act"));
  }

  static bool expect(const HostMatrix& blank, const std::vector<unsigned char>& bytes,
                     std::int64_t r, std::int64_t col, double want, double error,
                     const char* name) {
    return expect_close(blank.dtype, bytes, blank.position(r, col), want,
                        error + half_ulp(blank.dtype, std::fabs(want) + error), {name, r, col});
  }

  /// <d_out, down bias>.
  void add_share_of_bias(std::int64_t r) {
    const std::int64_t slot = host_.routing.gather_indices[r];
    for (std::int64_t h = 0; h < c_.hidden; ++h) {
      add_term(slot, static_cast<double>(host_.d_out.row(slot / c_.topk)[h]) *
                         static_cast<double>(host_.down_bias.row(host_.routing.owners[r])[h]));
    }
  }

  void add_term(std::int64_t slot, double term) {
    dots_[slot] += term;
    squares_[slot] += term * term;
  }

  const ActivationCase& c_;
  const HostActivation& host_;
  const HostMatrix& blank_pre_;
  const HostMatrix& blank_act_;
  std::vector<double> dots_, squares_, slack_;  ///< of each slot
};

void expect_backward(const RowTarget& target, const ActivationCase& c, DType dtype) {
  Memory& memory = *target.memory;
  const HostActivation host = build(c, dtype);
  const HostProblem& p = host.routing;
  const DType out_dtype = c.fp32_output ? DType::kFloat32 : dtype;
  const HostMatrix blank_pre =
      poisoned_matrix(out_dtype, c.rows, c.activation.input_columns(c.cols), c.padding, 0);
  const HostMatrix blank_act = poisoned_matrix(out_dtype, c.rows, c.cols, c.padding, 0);
  const DeviceMatrix pre(memory, host.pre), bias(memory, host.bias), d_act(memory, host.d_act);
  const DeviceMatrix d_out(memory, host.d_out), down_bias(memory, host.down_bias);
  const DeviceMatrix d_pre(memory, blank_pre), weighted_act(memory, blank_act);
  const DeviceVector sizes(memory, DType::kInt32, c.m_sizes);
  const DeviceVector indices(memory, c.index_dtype, p.gather_indices);
  const DeviceVector weights(memory, p.weights_dtype, p.router_weights);
  const DeviceVector d_weights(memory, DType::kFloat32, p.spec.flat_rows());
  const DeviceVector starts(memory, DType::kInt32, c.starts);
  RoutingView routing = segments_of(c, sizes, starts);
  if (!c.by_row) routing.gather_indices = indices.view();
  if (c.weighted) routing.router_weights = weights.view();
  const DeviceMatrix& act_memory = c.in_place ? d_act : weighted_act;
  ActivationGradientInputs inputs{d_act.view(), pre.view(), {}, {}, {}};
  if (c.bias) inputs.bias = bias.view();
  if (c.down_bias) {
    inputs.d_out = d_out.view();
    inputs.down_bias = down_bias.view();
  }
  activate_backward(inputs, routing, c.activation,
                    {d_pre.view(), c.with_weighted_act ? act_memory.view() : TensorView{},
                     c.with_d_weights ? d_weights.view() : TensorView{}},
                    memory.context());
  memory.synchronize();

  const std::vector<unsigned char> d_pre_bytes = d_pre.download();
  const std::vector<unsigned char> act_bytes = act_memory.download();
  BackwardCheck check(c, host, blank_pre, blank_act);
  for (std::int64_t r = 0; r < c.rows; ++r) {
    if (!check.expect_row(r, d_pre_bytes, act_bytes)) return;
  }
  if (c.with_d_weights && !check.expect_d_weights(d_weights.download())) return;
  expect_untouched_padding(blank_pre, d_pre_bytes);
  EXPECT_TRUE(d_pre.guards_intact() && act_memory.guards_intact() && d_weights.guards_intact());
}

}  // namespace

void add_activation_tests() {
  static const std::vector<ActivationCase> activations = activation_cases();
  constexpr DType kDtypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  for (const RowTarget& target : row_targets()) {
    for (int d = 0; d < 3; ++d) {
      const DType dtype = kDtypes[d];
      for (std::size_t i = 0; i < activations.size(); ++i) {
        const ActivationCase& c = activations[i];
        if (!kept(i, d, c.rows * c.cols)) continue;
        const std::string name = c.name + "_" + to_string(dtype);
        add_test(target.name + "/Activate", name,
                 [&target, &c, dtype] { expect_activate(target, c, dtype); });
        add_test(target.name + "/ActivateBackward", name,
                 [&target, &c, dtype] { expect_backward(target, c, dtype); });
      }
    }
  }
}

}  // namespace moegemm::testing
