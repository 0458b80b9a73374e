#include "core/refusal.h"
#include "core/validation/tensor_rules.h"
#include "moegemm/describe.h"

namespace moegemm {
namespace {

/// What layers of tokens and layers of rows have in common, by its names.
struct WeightArguments {
  Argument w_gate_up, w_up, w_down, gate_up_bias, down_bias;
};

/// The first product's weights: one matrix for each expert, or gates and ups apart.
void require_gate_up(const WeightArguments& weights, const Argument& x, std::int64_t experts,
                     std::int64_t columns, bool stored_nk) {
  const bool pair = weights.w_up.view.given();
  const char* const letters =
      stored_nk ? (pair ? "[E, I, H]" : "[E, C, H]") : (pair ? "[E, H, I]" : "[E, H, C]");
  const std::int64_t hidden = x.view.shape[1];
  for (const Argument* matrix : {&weights.w_gate_up, &weights.w_up}) {
    if (matrix == &weights.w_up && !pair) return;
    require_form(*matrix, {{3, letters}});
    require_same_dtype(*matrix, x);
    require_same_device(*matrix, x);
    if (stored_nk) {
      require_shape(*matrix, {experts, columns, hidden}, letters);
    } else {
      require_shape(*matrix, {experts, hidden, columns}, letters);
    }
  }
}

/// Returns E.
std::int64_t require_weights(const WeightArguments& weights, const Argument& x,
                             const Activation& activation, WeightLayout layout) {
  const bool stored_nk = layout == WeightLayout::kNk;
  const char* const down_letters = stored_nk ? "[E, H, I]" : "[E, I, H]";
  const Argument& w_down = weights.w_down;
  require_form(x, {{2, "[..., H]"}});
  require_floating(x);
  require_form(weights.w_gate_up, {{3, stored_nk ? "[E, C, H]" : "[E, H, C]"}});
  require_form(w_down, {{3, down_letters}});
  for (const Argument* matrix : {&weights.w_gate_up, &w_down}) {
    require_same_dtype(*matrix, x);
    require_same_device(*matrix, x);
  }
  const std::int64_t hidden = x.view.shape[1];
  const std::int64_t experts = w_down.view.shape[0];
  const std::int64_t inner = w_down.view.shape[stored_nk ? 2 : 1];
  require_extent(x, hidden, "H");
  require_extent(w_down, experts, "E");
  require_extent(w_down, inner, "I");
  const std::int64_t columns = activation.input_columns(inner);
  require_activation(activation, weights.w_gate_up.name, columns);
  if (weights.w_up.view.given()) require_halves(weights.w_up.name, activation);
  if (stored_nk) {
    require_shape(w_down, {experts, hidden, inner}, down_letters);
  } else {
    require_shape(w_down, {experts, inner, hidden}, down_letters);
  }
  require_gate_up(weights, x, experts, weights.w_up.view.given() ? inner : columns, stored_nk);
  const Argument &gate_up_bias = weights.gate_up_bias, &down_bias = weights.down_bias;
  if (gate_up_bias.view.given()) require_like(gate_up_bias, x, {experts, columns}, "[E, C]");
  if (down_bias.view.given()) require_like(down_bias, x, {experts, hidden}, "[E, H]");
  return experts;
}

WeightArguments named(const ExpertWeightViews& views) {
  const bool pair = views.w_up.given();
  return {{pair ? "w_gate_up[0]" : "w_gate_up", views.w_gate_up},
          {"w_gate_up[1]", views.w_up},
          {"w_down", views.w_down},
          {"gate_up_bias", views.gate_up_bias},
          {"down_bias", views.down_bias}};
}

}  // namespace

void check_layer(const LayerViews& views, const Activation& activation, WeightLayout layout) {
  const Argument x{"x", views.x};
  const Argument expert_ids{"expert_ids", views.expert_ids};
  const Argument router_weights{"router_weights", views.router_weights};
  require_weights(named(views.weights), x, activation, layout);
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

void check_expert_rows(const ExpertRowsViews& views, const Activation& activation,
                       WeightLayout layout) {
  const Argument rows{"rows", views.rows};
  const Argument sizes{"sizes", views.sizes};
  const Argument row_weights{"row_weights", views.row_weights};
  const std::int64_t experts = require_weights(named(views.weights), rows, activation, layout);
  require_sizes(sizes, rows);
  require_shape(sizes, {experts}, "[E]");
  if (row_weights.view.given()) {
    require_form(row_weights, {{1, "[R]"}});
    require_dtype_or_float32(row_weights, rows);
    require_same_device(row_weights, rows);
    require_shape(row_weights, {rows.view.shape[0]}, "[R]");
  }
}

}  // namespace moegemm
