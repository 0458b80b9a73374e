#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "conformance/passes/row_checks.h"
#include "conformance/suites.h"
#include "moegemm/passes.h"
#include "testing/device/device_vector.h"
#include "testing/numerics/oracle.h"
#include "testing/problem/problem_case.h"

namespace moegemm::testing {
namespace {

using Function = ActivationFunction;
using Layout = GateLayout;

/// fp32 roundings (and, on a GPU, approximated exponentials) of one element: 2 + 1.16 |x| ulps for
/// the exponential of x, and x stays below 20 here.
constexpr double kElementError = 64 * kFp32Roundoff;

constexpr Activation kGptOss = {Function::kSilu, Layout::kInterleaved, 1.702f, 7.0f, 1.0f};

struct ActivationCase {
  std::string name;
  Activation activation = {};
  std::vector<std::int64_t> m_sizes = {20, 0, 33, 1, 6};
  std::vector<std::int64_t> starts = {};  ///< none: segments follow one another
  Tails tails = Tails::kZero;
  std::int64_t expected_rows = -1;
  std::int64_t rows = 72;  ///< 12 of them past the segments
  std::int64_t cols = 64;  ///< activated
  std::int64_t hidden = 40;
  std::int64_t topk = 2;
  std::int64_t slots = -1;  ///< T * topk; -1: as many as rows
  std::int64_t padding = 0;
  float scale = 4;  ///< of the first product's elements
  bool bias = false;
  bool down_bias = false;
  bool weighted = true;
  bool with_weighted_act = true;
  bool with_d_weights = true;
  bool in_place = false;
  bool fp32_output = false;
  bool fp32_d_act = false;
  bool nan_tail = false;
  bool by_row = false;  ///< rows have weights in expert order, and no indices
  std::vector<std::int64_t> bad_indices = {};
  DType index_dtype = DType::kInt32;
};

/// Segments with gaps, and tails that are left alone.
void add_placed_cases(std::vector<ActivationCase>& cases) {
  for (const Tails tails : {Tails::kZero, Tails::kUndefined}) {
    const std::string suffix = tails == Tails::kZero ? "" : "Undefined";
    ActivationCase c = {.name = "Gaps" + suffix,
                        .starts = {50, 3, 8, 71, 0},
                        .tails = tails,
                        .bias = true,
                        .down_bias = true,
                        .nan_tail = true};
    cases.push_back(c);
    c.name = "GapsUnaligned" + suffix;
    c.cols = 37;
    c.padding = 3;
    cases.push_back(c);
    c = {.name = "ManyGaps" + suffix,
         .activation = kGptOss,
         .m_sizes = std::vector<std::int64_t>(300, 3),
         .tails = tails,
         .rows = 1500,
         .cols = 264,
         .topk = 1,
         .bias = true,
         .nan_tail = true,
         .by_row = true};
    for (int e = 0; e < 300; ++e) c.starts.push_back(5 * (299 - e));
    cases.push_back(c);
    c = {.name = "FewerRowsExpected" + suffix,
         .tails = tails,
         .expected_rows = 10,
         .rows = 3000,
         .cols = 768,
         .topk = 8,
         .nan_tail = true};
    cases.push_back(c);
  }
}

std::vector<ActivationCase> activation_cases() {
  std::vector<ActivationCase> cases = {
      {.name = "NoRows", .m_sizes = {0, 0}, .rows = 0},
      {.name = "NoRowsOfSomeSlots", .m_sizes = {0, 0}, .rows = 0, .slots = 10},
      {.name = "FewRowsOfManySlots", .slots = 400, .down_bias = true},
      {.name = "MoreRowsThanSlots", .slots = 20},
      {.name = "Plain"},
      {.name = "GptOss", .activation = kGptOss, .scale = 12, .bias = true, .down_bias = true},
      {.name = "GptOssUnaligned",
       .activation = kGptOss,
       .cols = 37,
       .hidden = 13,
       .padding = 3,
       .scale = 12,
       .bias = true,
       .down_bias = true},
      {.name = "ClampedConcatenated",
       .activation = {.alpha = 1.0f, .limit = 2.0f, .up_offset = 0.0f},
       .scale = 8},
      {.name = "DownBiasAlone", .down_bias = true},
      {.name = "Unweighted", .weighted = false},
      {.name = "InputGradientAlone",
       .weighted = false,
       .with_weighted_act = false,
       .with_d_weights = false},
      {.name = "WithoutWeightGradient", .with_d_weights = false},
      {.name = "WithoutWeightedActivation", .with_weighted_act = false},
      {.name = "InPlace", .in_place = true},
      {.name = "Fp32Output", .fp32_output = true},
      {.name = "GptOssInPlace", .activation = kGptOss, .cols = 648, .bias = true, .in_place = true},
      {.name = "GptOssFp32Output",
       .activation = kGptOss,
       .cols = 648,
       .bias = true,
       .fp32_output = true},
      {.name = "Fp32Gradient", .fp32_d_act = true},
      {.name = "Int64Indices", .index_dtype = DType::kInt64},
      {.name = "Strided", .padding = 8, .bias = true},
      {.name = "StridedUnaligned", .cols = 37, .padding = 3, .bias = true},
      {.name = "NanPastTheSegments", .bias = true, .nan_tail = true},
      {.name = "SizesExceedRows", .m_sizes = {30, 100, 7}, .bias = true},
      {.name = "NegativeSizes", .m_sizes = {-3, 30, -9, 7}, .bias = true},
      {.name = "IndicesOutOfRange", .bad_indices = {-1, 72, 1000, -100, 2147483647}},
      {.name = "Indices64BitTruncate",
       .bad_indices = {std::int64_t{1} << 32, (std::int64_t{1} << 32) + 5},
       .index_dtype = DType::kInt64},
      {.name = "WeightsOfRows", .topk = 1, .bias = true, .down_bias = true, .by_row = true},
      {.name = "WeightsOfRowsUnaligned",
       .cols = 37,
       .hidden = 13,
       .topk = 1,
       .padding = 3,
       .down_bias = true,
       .nan_tail = true,
       .by_row = true},
      {.name = "WeightsOfRowsGptOss",
       .activation = kGptOss,
       .m_sizes = {2000, 0, 1000},
       .rows = 3072,
       .cols = 648,
       .topk = 1,
       .bias = true,
       .in_place = true,
       .by_row = true},
      {.name = "Wide", .cols = 3000, .bias = true},
      {.name = "Many", .m_sizes = {2000, 0, 1000}, .rows = 3072, .cols = 72, .topk = 8},
      {.name = "ManyGptOss",
       .activation = kGptOss,
       .m_sizes = {2000, 0, 1000},
       .rows = 3072,
       .cols = 72,
       .topk = 8,
       .bias = true},
      {.name = "ManyExperts",
       .m_sizes = std::vector<std::int64_t>(700, 1),
       .rows = 720,
       .bias = true},
  };
  add_placed_cases(cases);
  for (const auto& function : kActivationFunctions) {
    for (const auto& layout : kGateLayouts) {
      ActivationCase c;
      c.name = std::string(function.name) + "_" + layout.name;
      c.activation = {.function = function.value, .layout = layout.value};
      cases.push_back(c);
      c.name += "_unaligned";
      c.cols = 27;
      c.bias = true;
      cases.push_back(c);
    }
  }
  // Strips of 256 columns, whole and not.
  for (const std::int64_t cols : {1, 2, 7, 8, 9, 31, 33, 128, 136, 264, 392, 520, 768}) {
    cases.push_back({.name = "Cols" + std::to_string(cols), .cols = cols});
    cases.push_back({.name = "GptOssCols" + std::to_string(cols),
                     .activation = kGptOss,
                     .cols = cols,
                     .bias = true,
                     .down_bias = true});
  }
  return cases;
}

/// The definition, in double.
struct Exact {
  double act, d_gate, d_up;
};

/// The derivative as a central difference of the definition, which needs no second formula. With
/// h = 1e-5 it is off by h^2 / 6 times a third derivative of at most a few units, and by 1e-16 / h.
double slope_at(const Activation& function, double g) {
  constexpr double kStep = 1e-5;
  if (function.function == Function::kRelu && std::fabs(g) < kStep) return g > 0 ? 1 : 0;
  return (activation_at(function, g + kStep, 0) - activation_at(function, g - kStep, 0)) /
         (2 * kStep);
}
constexpr double kDifferenceError = 1e-9;

Exact exact(const Activation& a, double gate, double up) {
  const Activation function = {.function = a.function, .layout = Layout::kNone, .alpha = a.alpha};
  const double limit = a.limit;
  const double g = std::min(gate, limit);
  const double f = activation_at(function, g, 0);
  const double slope = gate > limit ? 0.0 : slope_at(function, g);
  if (!a.gated()) return {f, slope, 0.0};
  const double factor = std::clamp(up, -limit, limit) + static_cast<double>(a.up_offset);
  return {activation_at(a, gate, up), slope * factor, std::fabs(up) > limit ? 0.0 : f};
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
        bound = std::fabs(weight) * kElementError *
                (std::fabs(e.act) + std::fabs(gate * e.d_gate) + std::fabs(up * e.d_up));
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

void expect_backward(const RowTarget& target, const ActivationCase& c, DType dtype) {
  Memory& memory = *target.memory;
  const HostActivation host = build(c, dtype);
  const HostProblem& p = host.routing;
  const Activation& activation = c.activation;
  const DType out_dtype = c.fp32_output ? DType::kFloat32 : dtype;
  const HostMatrix blank_pre =
      poisoned_matrix(out_dtype, c.rows, activation.input_columns(c.cols), c.padding, 0);
  const HostMatrix blank_act = poisoned_matrix(out_dtype, c.rows, c.cols, c.padding, 0);
  const DeviceMatrix pre(memory, host.pre), bias(memory, host.bias), d_act(memory, host.d_act);
  const DeviceMatrix d_out(memory, host.d_out), down_bias(memory, host.down_bias);
  const DeviceMatrix d_pre(memory, blank_pre), weighted_act(memory, blank_act);
  const DeviceVector sizes(memory, DType::kInt32, c.m_sizes);
  const DeviceVector indices(memory, c.index_dtype, p.gather_indices);
  const DeviceVector weights(memory, p.weights_dtype, p.router_weights);
  const std::int64_t slots = p.spec.flat_rows();
  const DeviceVector d_weights(memory, DType::kFloat32, slots);
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
  activate_backward(inputs, routing, activation,
                    {d_pre.view(), c.with_weighted_act ? act_memory.view() : TensorView{},
                     c.with_d_weights ? d_weights.view() : TensorView{}},
                    memory.context());
  memory.synchronize();

  const std::vector<unsigned char> d_pre_bytes = d_pre.download();
  const std::vector<unsigned char> act_bytes = act_memory.download();
  std::vector<double> dots(slots, 0.0), squares(slots, 0.0), slack(slots, 0.0);
  const auto expect = [&](const HostMatrix& blank, const std::vector<unsigned char>& bytes,
                          std::int64_t r, std::int64_t col, double want, double error,
                          const char* name) {
    return expect_close(blank.dtype, bytes, blank.position(r, col), want,
                        error + half_ulp(blank.dtype, std::fabs(want) + error), {name, r, col});
  };
  for (std::int64_t r = 0; r < c.rows; ++r) {
    if (is_left_alone(c, p, r, blank_pre, d_pre_bytes)) continue;
    const bool used = host.used(r);
    const double weight = used && c.weighted ? p.scale(r) : 1.0;
    for (std::int64_t col = 0; col < c.cols; ++col) {
      Exact e = {};
      double gate = 0, up = 0, gradient = 0;
      if (used) {
        gate = host.pre_at(c, r, gate_column(activation, col));
        up = activation.gated() ? host.pre_at(c, r, up_column(activation, c.cols, col)) : 1.0;
        e = exact(activation, gate, up);
        gradient = host.d_act.row(r)[col];
        // How far the activation may be off: its own roundings and those of its inputs.
        slack[p.gather_indices[r]] +=
            kElementError * std::fabs(gradient) *
            (std::fabs(e.act) + std::fabs(gate * e.d_gate) + std::fabs(up * e.d_up));
        dots[p.gather_indices[r]] += gradient * e.act;
        squares[p.gather_indices[r]] += gradient * e.act * gradient * e.act;
      }
      const double scale = std::fabs(weight * gradient);
      const double factor =
          1 + std::fabs(up) + std::fabs(static_cast<double>(activation.up_offset));
      const double slope_error =
          scale * factor *
          (kElementError * (2 + std::fabs(gate)) * (1 + std::fabs(gate)) + kDifferenceError);
      const double up_error = kElementError * scale * (1 + std::fabs(gate)) * (1 + std::fabs(gate));
      const double act_error =
          kElementError * std::fabs(weight) *
          (std::fabs(e.act) + std::fabs(gate * e.d_gate) + std::fabs(up * e.d_up));
      if (!expect(blank_pre, d_pre_bytes, r, gate_column(activation, col),
                  weight * gradient * e.d_gate, slope_error, "d_gate") ||
          (activation.gated() &&
           !expect(blank_pre, d_pre_bytes, r, up_column(activation, c.cols, col),
                   weight * gradient * e.d_up, up_error, "d_up")) ||
          (c.with_weighted_act && !expect(c.in_place ? host.d_act : blank_act, act_bytes, r, col,
                                          weight * e.act, act_error, "weighted_act"))) {
        return;
      }
    }
    for (std::int64_t h = 0; used && c.down_bias && h < c.hidden; ++h) {
      const double term = static_cast<double>(host.d_out.row(p.gather_indices[r] / c.topk)[h]) *
                          static_cast<double>(host.down_bias.row(p.owners[r])[h]);
      dots[p.gather_indices[r]] += term;
      squares[p.gather_indices[r]] += term * term;
    }
  }
  const std::vector<unsigned char> dot_bytes = d_weights.download();
  for (std::int64_t i = 0; c.with_d_weights && i < slots; ++i) {
    const double bound =
        slack[i] + sum_bound(DType::kFloat32, c.cols + c.hidden, dots[i], squares[i]);
    if (!expect_close(DType::kFloat32, dot_bytes, i, dots[i], bound, {"d_weights", i, 0})) return;
  }
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
