#include "core/refusal.h"
#include "core/registry.h"
#include "core/validation/tensor_rules.h"
#include "moegemm/passes.h"

namespace moegemm {
namespace {

/// The first product's output, and how many columns of it are activated.
std::int64_t activated_columns(const Argument& pre, const Activation& activation) {
  require_form(pre, {{2, "[M, I] or [M, 2 I]"}});
  require_floating(pre);
  return require_activation(activation, pre.name, pre.view.shape[1]);
}

}  // namespace

void activate(const TensorView& pre_view, const TensorView& bias_view, const RoutingView& routing,
              const Activation& activation, const TensorView& act_view,
              const ExecutionContext& context) {
  const Argument pre{"pre", pre_view};
  const Argument bias{"bias", bias_view};
  const auto [m_sizes, starts, indices, weights] = RoutingArguments(routing);
  const Argument act{"act", act_view};
  const std::int64_t columns = activated_columns(pre, activation);
  const std::int64_t experts = require_segments(routing, pre);
  require_like_or_float32(act, pre, {pre_view.shape[0], columns}, "[M, I]");
  if (bias_view.given()) require_like(bias, pre, {experts, pre_view.shape[1]}, "[E, C]");
  if (weights.view.given()) require_router_weights(weights, pre, pre_view.shape[0], 1);
  require_apart({&act}, {&pre, &m_sizes, &starts, &bias, &weights});
  require_dense(weights);
  passes_for(pre_view.device).activate(pre_view, bias_view, routing, activation, act_view, context);
}

void activate_backward(const ActivationGradientInputs& inputs, const RoutingView& routing,
                       const Activation& activation, const ActivationGradientOutputs& outputs,
                       const ExecutionContext& context) {
  const Argument pre{"pre", inputs.pre};
  const Argument d_act{"d_act", inputs.d_act};
  const Argument bias{"bias", inputs.bias};
  const Argument d_out{"d_out", inputs.d_out};
  const Argument down_bias{"down_bias", inputs.down_bias};
  const auto [m_sizes, starts, indices, weights] = RoutingArguments(routing);
  const Argument d_pre{"d_pre", outputs.d_pre};
  const Argument weighted_act{"weighted_act", outputs.weighted_act};
  const Argument d_weights{"d_weights", outputs.d_weights};

  require_topk(routing.topk);
  const std::int64_t columns = activated_columns(pre, activation);
  const std::int64_t rows = inputs.pre.shape[0];
  const std::int64_t experts = require_segments(routing, pre);
  require_like_or_float32(d_act, pre, {rows, columns}, "[M, I]");
  require_like_or_float32(d_pre, pre, {rows, inputs.pre.shape[1]}, "[M, C]");
  if (inputs.bias.given()) require_like(bias, pre, {experts, inputs.pre.shape[1]}, "[E, C]");

  const bool flat = routing.router_weights.given() || outputs.d_weights.given();
  const std::int64_t flat_rows = flat_rows_of(routing, outputs, rows);
  if (routing.gather_indices.given()) {
    require_indices(indices, pre);
    require_shape(indices, {rows}, "[M]");
  } else if (flat && (routing.topk != 1 || flat_rows != rows)) {
    refuse_value("gather_indices is not given, with topk = ", routing.topk, ", ", flat_rows,
                 " weights and ", rows,
                 " rows; rows in expert order have topk = 1 and a weight each");
  }
  if (flat && flat_rows % routing.topk != 0) {
    refuse_value(routing.router_weights.given() ? "router_weights" : "d_weights", " has ",
                 flat_rows, " elements; it must have a multiple of topk = ", routing.topk);
  }
  if (routing.router_weights.given()) {
    require_router_weights(weights, pre, flat_rows, routing.topk);
  }
  if (inputs.d_out.given() != inputs.down_bias.given()) {
    refuse_value("d_out and down_bias go together; only ",
                 inputs.d_out.given() ? "d_out" : "down_bias", " is given");
  }
  if (inputs.down_bias.given()) {
    if (!outputs.d_weights.given()) {
      refuse_value("down_bias is given without d_weights; it only adds to d_weights");
    }
    require_form(d_out, {{2, "[T, H]"}});
    require_same_dtype(d_out, pre);
    require_same_device(d_out, pre);
    const std::int64_t tokens = inputs.d_out.shape[0];
    if (checked_product(tokens, routing.topk, "T * topk") != flat_rows) {
      refuse_value("d_out has ", tokens, " rows; it must have T = M / topk = ", flat_rows, " / ",
                   routing.topk);
    }
    require_like(down_bias, pre, {experts, inputs.d_out.shape[1]}, "[E, H]");
  }

  if (outputs.d_weights.given()) {
    require_like_or_float32(d_weights, pre, {flat_rows}, "[M]");
  }
  if (outputs.weighted_act.given()) {
    require_like_or_float32(weighted_act, pre, {rows, columns}, "[M, I]");
  }
  require_apart({&d_pre, &d_weights, &weighted_act},
                {&pre, &d_act, &bias, &d_out, &down_bias, &m_sizes, &starts, &indices, &weights},
                {&weighted_act, &d_act});
  require_dense(weights);
  passes_for(inputs.pre.device).activate_backward(inputs, routing, activation, outputs, context);
}

void add_weighted_bias(const TensorView& rows_view, const TensorView& bias_view,
                       const RoutingView& routing, const TensorView& out_view,
                       const ExecutionContext& context) {
  const Argument rows{"rows", rows_view};
  const Argument bias{"bias", bias_view};
  const auto [m_sizes, starts, indices, weights] = RoutingArguments(routing);
  const Argument out{"out", out_view};
  require_form(out, {{2, "[M, C]"}});
  require_floating(out);
  require_like_or_float32(rows, out, {out_view.shape[0], out_view.shape[1]}, "[M, C]");
  const std::int64_t experts = require_segments(routing, out);
  require_like(bias, out, {experts, out_view.shape[1]}, "[E, C]");
  require_router_weights(weights, out, out_view.shape[0], 1);
  require_apart({&out}, {&rows, &bias, &m_sizes, &starts, &weights}, {&out, &rows});
  require_dense(weights);
  passes_for(out_view.device).add_to_rows(rows_view, bias_view, routing, out_view, context);
}

void add_rows(const TensorView& a_view, const TensorView& b_view, const RoutingView& routing,
              const TensorView& out_view, const ExecutionContext& context) {
  const Argument a{"a", a_view};
  const Argument b{"b", b_view};
  const auto [m_sizes, starts, indices, weights] = RoutingArguments(routing);
  const Argument out{"out", out_view};
  require_form(out, {{2, "[M, C]"}});
  require_floating(out);
  for (const Argument* term : {&a, &b}) {
    require_like_or_float32(*term, out, {out_view.shape[0], out_view.shape[1]}, "[M, C]");
    if (term->view.dtype != DType::kFloat32) {
      refuse_type(term->name, " has dtype ", to_string(term->view.dtype), "; it must have fp32");
    }
  }
  require_segments(routing, out);
  require_apart({&out}, {&a, &b, &m_sizes, &starts}, {&out, &a});
  RoutingView segments = routing;
  segments.router_weights = {};
  passes_for(out_view.device).add_to_rows(a_view, b_view, segments, out_view, context);
}

void expert_sums(const TensorView& rows_view, const RoutingView& routing,
                 const TensorView& sums_view, const ExecutionContext& context) {
  const Argument rows{"rows", rows_view};
  const Argument sums{"sums", sums_view};
  const auto [m_sizes, starts, indices, weights] = RoutingArguments(routing);
  require_topk(routing.topk);
  require_form(rows, {{2, "[M, C] or [T, C]"}});
  require_floating(rows);
  const std::int64_t experts = require_segments(routing, rows);
  require_like_or_float32(sums, rows, {experts, rows_view.shape[1]}, "[E, C]");
  if (routing.gather_indices.given()) {
    const std::int64_t count = checked_product(rows_view.shape[0], routing.topk, "T * topk");
    require_indices(indices, rows);  // of any length
    if (routing.router_weights.given()) require_router_weights(weights, rows, count, routing.topk);
  } else if (routing.router_weights.given()) {
    refuse_value("gather_indices is not given; router_weights need it");
  }
  require_apart({&sums}, {&rows, &m_sizes, &starts, &indices, &weights});
  require_dense(weights);
  passes_for(rows_view.device).expert_sums(rows_view, routing, sums_view, context);
}

}  // namespace moegemm
