#include "moegemm/describe.h"
#include "moegemm/passes.h"
#include "registration.h"
#include "routing_arguments.h"
#include "runtime/execution.h"

namespace moegemm::torch_ops {
namespace {

/// Exponentials and the like: one element of an activation costs about this many operations.
constexpr double kElementFlops = 20;

ExpertWeightViews weights_metadata(const Tensor& w_gate_up, const Tensor& w_down,
                                   const std::optional<Tensor>& gate_up_bias,
                                   const std::optional<Tensor>& down_bias,
                                   const std::optional<Tensor>& w_up) {
  return {Argument("w_gate_up", w_gate_up).metadata(), Argument("w_down", w_down).metadata(),
          Argument("gate_up_bias", gate_up_bias).metadata(),
          Argument("down_bias", down_bias).metadata(), Argument("w_gate_up[1]", w_up).metadata()};
}

WeightLayout layout_of(bool transposed) {
  return transposed ? WeightLayout::kKn : WeightLayout::kNk;
}

/// See moegemm::check_layer.
void check_layer(Tensor x, Tensor w_gate_up, Tensor w_down, Tensor expert_ids,
                 std::optional<Tensor> router_weights, std::optional<Tensor> gate_up_bias,
                 std::optional<Tensor> down_bias, std::string activation, bool transposed,
                 std::optional<Tensor> w_up) {
  raising([&] {
    moegemm::check_layer({Argument("x", x).metadata(),
                          weights_metadata(w_gate_up, w_down, gate_up_bias, down_bias, w_up),
                          Argument("expert_ids", expert_ids).metadata(),
                          Argument("router_weights", router_weights).metadata()},
                         parse_activation(activation), layout_of(transposed));
  });
}

/// See moegemm::check_expert_rows.
void check_expert_rows(Tensor rows, Tensor w_gate_up, Tensor w_down, Tensor sizes,
                       std::optional<Tensor> row_weights, std::optional<Tensor> gate_up_bias,
                       std::optional<Tensor> down_bias, std::string activation, bool transposed,
                       std::optional<Tensor> w_up) {
  raising([&] {
    moegemm::check_expert_rows(
        {Argument("rows", rows).metadata(),
         weights_metadata(w_gate_up, w_down, gate_up_bias, down_bias, w_up),
         Argument("sizes", sizes).metadata(), Argument("row_weights", row_weights).metadata()},
        parse_activation(activation), layout_of(transposed));
  });
}

Tensor activate(Tensor pre, std::optional<Tensor> bias, Tensor m_sizes, std::string activation,
                std::optional<Tensor> row_weights, std::string options) {
  return raising([&] {
    const Activation parsed = parse_activation(activation);
    Argument input("pre", pre), biases("bias", bias);
    RoutingArguments routing(m_sizes, std::nullopt, row_weights, 1);
    const TensorView pre_view = input.readable(), bias_view = biases.readable();
    const RoutingView routing_view = routing.readable(options);
    const Execution execution(input.device(), kElementFlops * static_cast<double>(input.numel()));
    Output act = allocate(input.size(0), parsed.activated_columns(input.columns()), input.dtype(),
                          input.device());
    moegemm::activate(pre_view, bias_view, routing_view, parsed, act.view, execution.context());
    return act.hand_over();
  });
}

/// d_pre and (empty unless asked for) d_weights; with need_weighted_act the weighted activation
/// replaces d_act. See moegemm::activate_backward.
std::tuple<Tensor, Tensor> activate_backward(Tensor d_act, Tensor pre, std::optional<Tensor> bias,
                                             Tensor m_sizes, std::optional<Tensor> gather_indices,
                                             std::optional<Tensor> router_weights,
                                             std::int64_t topk, std::optional<Tensor> d_out,
                                             std::optional<Tensor> down_bias,
                                             std::string activation, bool need_weighted_act,
                                             bool need_d_weights, std::string options) {
  return raising([&] {
    Argument gradient("d_act", d_act), input("pre", pre), biases("bias", bias);
    Argument d_outs("d_out", d_out), down_biases("down_bias", down_bias);
    RoutingArguments routing(m_sizes, gather_indices, router_weights, topk);
    const RoutingView routing_view = routing.readable(options);
    ActivationGradientInputs inputs;
    inputs.d_act = need_weighted_act ? gradient.writable() : gradient.readable();
    inputs.pre = input.readable();
    inputs.bias = biases.readable();
    inputs.d_out = d_outs.readable();
    inputs.down_bias = down_biases.readable();
    const Execution execution(input.device(), kElementFlops * static_cast<double>(input.numel()));
    Output d_pre = allocate(input.size(0), input.columns(), input.dtype(), input.device());
    const TensorView& weights = routing_view.router_weights;
    const std::int64_t slots = weights.given() ? weights.numel() : input.size(0);
    Output d_weights = allocate(need_d_weights ? slots : 0, DType::kFloat32, input.device());
    ActivationGradientOutputs outputs;
    outputs.d_pre = d_pre.view;
    if (need_weighted_act) outputs.weighted_act = inputs.d_act;
    if (need_d_weights) outputs.d_weights = d_weights.view;
    moegemm::activate_backward(inputs, routing_view, parse_activation(activation), outputs,
                               execution.context());
    return std::make_tuple(d_pre.hand_over(), d_weights.hand_over());
  });
}

/// See moegemm::add_weighted_bias.
void add_weighted_bias(Tensor rows, Tensor bias, Tensor m_sizes, Tensor row_weights, Tensor out,
                       std::string options) {
  raising([&] {
    Argument input("rows", rows), biases("bias", bias), target("out", out);
    RoutingArguments routing(m_sizes, std::nullopt, row_weights, 1);
    const RoutingView routing_view = routing.readable(options);
    const TensorView rows_view = input.readable(), bias_view = biases.readable();
    const Execution execution(target.device(), 2.0 * static_cast<double>(target.numel()));
    moegemm::add_weighted_bias(rows_view, bias_view, routing_view, target.writable(),
                               execution.context());
  });
}

/// See moegemm::add_rows.
void add_rows(Tensor a, Tensor b, Tensor m_sizes, Tensor out, std::string options) {
  raising([&] {
    Argument first("a", a), second("b", b), target("out", out);
    RoutingArguments routing(m_sizes, std::nullopt, std::nullopt, 1);
    const RoutingView routing_view = routing.readable(options);
    const TensorView a_view = first.readable(), b_view = second.readable();
    const Execution execution(target.device(), static_cast<double>(target.numel()));
    moegemm::add_rows(a_view, b_view, routing_view, target.writable(), execution.context());
  });
}

Tensor expert_sums(Tensor rows, Tensor m_sizes, std::optional<Tensor> gather_indices,
                   std::optional<Tensor> router_weights, std::int64_t topk) {
  return raising([&] {
    Argument input("rows", rows);
    RoutingArguments routing(m_sizes, gather_indices, router_weights, topk);
    const RoutingView routing_view = routing.readable();
    const TensorView rows_view = input.readable();
    const Execution execution(input.device(), 2.0 * static_cast<double>(input.numel()));
    Output sums =
        allocate(routing_view.m_sizes.shape[0], input.columns(), input.dtype(), input.device());
    moegemm::expert_sums(rows_view, routing_view, sums.view, execution.context());
    return sums.hand_over();
  });
}

constexpr Operator kOperators[] = {
    {"check_layer(Tensor x, Tensor w_gate_up, Tensor w_down, Tensor expert_ids, "
     "Tensor? router_weights, Tensor? gate_up_bias, Tensor? down_bias, str activation, "
     "bool transposed, Tensor? w_up=None) -> ()",
     TORCH_BOX(&check_layer)},
    {"check_expert_rows(Tensor rows, Tensor w_gate_up, Tensor w_down, Tensor sizes, "
     "Tensor? row_weights, Tensor? gate_up_bias, Tensor? down_bias, str activation, "
     "bool transposed, Tensor? w_up=None) -> ()",
     TORCH_BOX(&check_expert_rows)},
    {"activate(Tensor pre, Tensor? bias, Tensor m_sizes, str activation, "
     "Tensor? row_weights=None, str options=\"\") -> Tensor",
     TORCH_BOX(&activate)},
    {"add_weighted_bias(Tensor rows, Tensor bias, Tensor m_sizes, Tensor row_weights, "
     "Tensor(a!) out, str options=\"\") -> ()",
     TORCH_BOX(&add_weighted_bias)},
    {"add_rows(Tensor a, Tensor b, Tensor m_sizes, Tensor(a!) out, str options=\"\") -> "
     "()",
     TORCH_BOX(&add_rows)},
    {"activate_backward(Tensor(a!) d_act, Tensor pre, Tensor? bias, Tensor m_sizes, "
     "Tensor? gather_indices, Tensor? router_weights, int topk, Tensor? d_out, Tensor? down_bias, "
     "str activation, bool need_weighted_act, bool need_d_weights, str options=\"\") -> "
     "(Tensor, Tensor)",
     TORCH_BOX(&activate_backward)},
    {"expert_sums(Tensor rows, Tensor m_sizes, Tensor? gather_indices, Tensor? router_weights, "
     "int topk) -> Tensor",
     TORCH_BOX(&expert_sums)},
};

}  // namespace

MOEGEMM_REGISTER(kOperators)

}  // namespace moegemm::torch_ops
