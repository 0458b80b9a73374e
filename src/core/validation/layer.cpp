#include "core/validation/tensor_rules.h"
#include "moegemm/describe.h"

namespace moegemm {

void check_layer(const LayerViews& views, const Activation& activation, WeightLayout layout) {
  const Argument x{"x", views.x};
  const Argument w_gate_up{"w_gate_up", views.w_gate_up};
  const Argument w_down{"w_down", views.w_down};
  const Argument expert_ids{"expert_ids", views.expert_ids};
  const Argument router_weights{"router_weights", views.router_weights};
  const Argument gate_up_bias{"gate_up_bias", views.gate_up_bias};
  const Argument down_bias{"down_bias", views.down_bias};
  const bool stored_nk = layout == WeightLayout::kNk;
  const char* const gate_up_letters = stored_nk ? "[E, C, H]" : "[E, H, C]";
  const char* const down_letters = stored_nk ? "[E, H, I]" : "[E, I, H]";

  require_form(x, {{2, "[..., H]"}});
  require_floating(x);
  require_form(w_gate_up, {{3, gate_up_letters}});
  require_form(w_down, {{3, down_letters}});
  for (const Argument* weights : {&w_gate_up, &w_down}) {
    require_same_dtype(*weights, x);
    require_same_device(*weights, x);
  }
  const std::int64_t hidden = x.view.shape[1];
  const std::int64_t experts = w_down.view.shape[0];
  const std::int64_t inner = w_down.view.shape[stored_nk ? 2 : 1];
  require_extent(x, hidden, "H");
  require_extent(w_down, experts, "E");
  require_extent(w_down, inner, "I");
  const std::int64_t columns = activation.input_columns(inner);
  require_activation(activation, w_gate_up.name, columns);
  if (stored_nk) {
    require_shape(w_down, {experts, hidden, inner}, down_letters);
    require_shape(w_gate_up, {experts, columns, hidden}, gate_up_letters);
  } else {
    require_shape(w_down, {experts, inner, hidden}, down_letters);
    require_shape(w_gate_up, {experts, hidden, columns}, gate_up_letters);
  }
  if (gate_up_bias.view.given()) require_like(gate_up_bias, x, {experts, columns}, "[E, C]");
  if (down_bias.view.given()) require_like(down_bias, x, {experts, hidden}, "[E, H]");

  const std::int64_t tokens = x.view.shape[0];
  require_form(expert_ids, {{2, "[..., topk]"}});
  require_index(expert_ids);
  require_same_device(expert_ids, x);
  const std::int64_t topk = expert_ids.view.shape[1];
  require_extent(expert_ids, topk, "topk, its last dimension,");
  require_shape(expert_ids, {tokens, topk}, "[T, topk]");
  if (router_weights.view.given()) {
    require_like_or_float32(router_weights, x, {tokens, topk}, "[T, topk]");
  }
}

}  // namespace moegemm
