#include "core/refusal.h"
#include "core/registry.h"
#include "core/validation/route_rules.h"
#include "core/validation/tensor_rules.h"
#include "moegemm/passes.h"

namespace moegemm {

const Passes& passes_for(Device device) {
  const Passes* passes = passes_on(device.type);
  if (passes == nullptr) {
    throw Error(ErrorKind::kNotImplemented, join("tensors are on ", to_string(device),
                                                 ", but this library was built without CUDA"));
  }
  return *passes;
}

void route(const TensorView& expert_ids_view, std::int64_t num_experts,
           const TensorView& m_sizes_view, const TensorView& gather_indices_view,
           const TensorView& inverse_view, void* workspace, const ExecutionContext& context) {
  const Argument expert_ids{"expert_ids", expert_ids_view};
  const Argument m_sizes{"m_sizes", m_sizes_view};
  const Argument gather_indices{"gather_indices", gather_indices_view};
  const Argument inverse{"inverse", inverse_view};
  require_routes(expert_ids, num_experts, m_sizes);
  const std::int64_t rows = expert_ids_view.numel();
  require_like(gather_indices, m_sizes, {rows}, "[M]");
  if (inverse_view.given()) require_like(inverse, m_sizes, {rows}, "[M]");
  require_apart({&m_sizes, &gather_indices, &inverse}, {&expert_ids});
  require_workspace(workspace, expert_ids_view, num_experts)
      .route(expert_ids_view, num_experts, m_sizes_view, gather_indices_view, inverse_view,
             workspace, context);
}

std::int64_t route_workspace_bytes(std::int64_t rows, std::int64_t num_experts, Device device) {
  if (rows < 0) refuse_value("rows is ", rows, "; it must not be negative");
  require_experts(num_experts);
  return passes_for(device).route_workspace_bytes(rows, num_experts);
}

void combine(const TensorView& rows_view, const TensorView& weights_view, std::int64_t topk,
             const TensorView& out_view, const ExecutionContext& context) {
  const Argument rows{"rows", rows_view};
  const Argument weights{"weights", weights_view};
  const Argument out{"out", out_view};
  require_topk(topk);
  require_form(rows, {{2, "[M, C]"}});
  require_floating(rows);
  const std::int64_t count = rows_view.shape[0];
  if (count % topk != 0) {
    refuse_value("rows is ", to_string(rows_view),
                 "; its rows must be a multiple of topk = ", topk);
  }
  if (weights_view.given()) require_router_weights(weights, rows, count, topk);
  require_like_or_float32(out, rows, {count / topk, rows_view.shape[1]}, "[T, C]");
  require_apart({&out}, {&rows, &weights});
  require_dense(weights);
  passes_for(rows_view.device).combine(rows_view, weights_view, {}, topk, out_view, context);
}

void scale_rows(const TensorView& product_view, const TensorView& x_view,
                const RoutingView& routing, const TensorView& scaled_view,
                const TensorView& dot_view, const TensorView& scaled_x_view,
                const ExecutionContext& context) {
  const Argument product{"product", product_view};
  const Argument x{"x", x_view};
  const Argument scaled{"scaled", scaled_view};
  const Argument dot{"dot", dot_view};
  const Argument scaled_x{"scaled_x", scaled_x_view};
  const auto [m_sizes, starts, indices, weights] = RoutingArguments(routing);
  require_topk(routing.topk);
  require_form(x, {{2, "[M, K]"}});
  require_floating(x);
  const std::int64_t rows = x_view.shape[0];
  require_like_or_float32(product, x, {rows, x_view.shape[1]}, "[M, K]");
  require_like_or_float32(scaled, x, {rows, x_view.shape[1]}, "[M, K]");

  require_segments(routing, x);
  if (routing.segments() != Segments::kPacked) {
    refuse_value("scale_rows with ", routing.ends ? "ends" : "starts",
                 "; its segments must follow one another");
  }
  require_indices(indices, x);
  require_shape(indices, {rows}, "[M]");
  require_router_weights(weights, x, rows, routing.topk);
  require_like_or_float32(dot, x, {rows}, "[M]");
  if (scaled_x_view.given()) require_like(scaled_x, x, {rows, x_view.shape[1]}, "[M, K]");
  require_apart({&scaled, &dot, &scaled_x}, {&product, &x, &m_sizes, &indices, &weights},
                {&scaled, &product});
  require_dense(weights);
  passes_for(product_view.device)
      .scale_rows(product_view, x_view, routing, scaled_view, dot_view, scaled_x_view, context);
}

}  // namespace moegemm
