#include "gemm_rules.h"
#include "moegemm/activation.h"
#include "moegemm/routing.h"
#include "operators.h"
#include "runtime/execution.h"

namespace moegemm::torch_ops {
namespace {

/// Exponentials and the like: one element of an activation costs about this many operations.
constexpr double kElementFlops = 20;

/// The I of [M, I or 2 I].
std::int64_t activated_columns(const Argument& pre, const Activation& activation) {
  pre.require_rank(2, "[M, I] or [M, 2 I]");
  pre.require_floating();
  if (activation.gated() && pre.size(1) % 2 != 0) {
    refuse_value(pre.name(), " is ", pre.describe(),
                 "; with a gate its columns must be even, gate and up in equal numbers");
  }
  return activation.gated() ? pre.size(1) / 2 : pre.size(1);
}

TensorView readable(Argument& argument) {
  return argument.given() ? argument.readable() : TensorView{};
}

}  // namespace

Tensor activate(Tensor pre, std::optional<Tensor> bias, Tensor m_sizes,
                const std::string& activation) {
  return raising([&] {
    const Activation parsed = parse_activation(activation);
    Argument input("pre", pre), biases("bias", bias), sizes("m_sizes", m_sizes);
    const std::int64_t columns = activated_columns(input, parsed);
    const TensorView pre_view = input.readable(), bias_view = readable(biases);
    const TensorView sizes_view = sizes.readable();
    const Execution execution(input.device(), kElementFlops * static_cast<double>(input.numel()));
    Output act = allocate({input.size(0), columns}, input.dtype(), input.device());
    moegemm::activate(pre_view, bias_view, sizes_view, parsed, act.view, execution.context());
    return act.hand_over();
  });
}

std::tuple<Tensor, Tensor> activate_backward(Tensor d_act, Tensor pre, std::optional<Tensor> bias,
                                             Tensor m_sizes, std::optional<Tensor> gather_indices,
                                             std::optional<Tensor> topk_weights, std::int64_t topk,
                                             std::optional<Tensor> d_out,
                                             std::optional<Tensor> down_bias,
                                             const std::string& activation, bool need_weighted_act,
                                             bool need_d_weights) {
  return raising([&] {
    const Activation parsed = parse_activation(activation);
    Argument gradient("d_act", d_act), input("pre", pre), biases("bias", bias);
    Argument d_outs("d_out", d_out), down_biases("down_bias", down_bias);
    activated_columns(input, parsed);
    RoutingArguments routing{Argument("m_sizes", m_sizes),
                             Argument("gather_indices", gather_indices),
                             Argument("topk_weights", topk_weights), topk};
    const RoutingView routing_view = routing.readable();
    ActivationGradientInputs inputs;
    inputs.d_act = need_weighted_act ? gradient.writable() : gradient.readable();
    inputs.pre = input.readable();
    inputs.bias = readable(biases);
    inputs.d_out = readable(d_outs);
    inputs.down_bias = readable(down_biases);
    const Execution execution(input.device(), kElementFlops * static_cast<double>(input.numel()));
    Output d_pre = allocate({input.size(0), input.size(1)}, input.dtype(), input.device());
    const std::int64_t slots =
        routing.topk_weights.given() ? routing.topk_weights.numel() : input.size(0);
    Output d_weights = allocate({need_d_weights ? slots : 0}, DType::kFloat32, input.device());
    ActivationGradientOutputs outputs;
    outputs.d_pre = d_pre.view;
    if (need_weighted_act) outputs.weighted_act = inputs.d_act;
    if (need_d_weights) outputs.d_weights = d_weights.view;
    moegemm::activate_backward(inputs, routing_view, parsed, outputs, execution.context());
    return std::make_tuple(d_pre.hand_over(), d_weights.hand_over());
  });
}

Tensor expert_sums(Tensor rows, Tensor m_sizes, std::optional<Tensor> gather_indices,
                   std::optional<Tensor> topk_weights, std::int64_t topk) {
  return raising([&] {
    Argument input("rows", rows);
    input.require_rank(2, "[M, C] or [T, C]");
    input.require_floating();
    RoutingArguments routing{Argument("m_sizes", m_sizes),
                             Argument("gather_indices", gather_indices),
                             Argument("topk_weights", topk_weights), topk};
    routing.m_sizes.require_rank(1, "[E]");
    const RoutingView routing_view = routing.readable();
    const TensorView rows_view = input.readable();
    const Execution execution(input.device(), 2.0 * static_cast<double>(input.numel()));
    Output sums = allocate({routing.m_sizes.size(0), input.size(1)}, input.dtype(), input.device());
    moegemm::expert_sums(rows_view, routing_view, sums.view, execution.context());
    return sums.hand_over();
  });
}

}  // namespace moegemm::torch_ops
