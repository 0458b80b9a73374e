#include <iterator>

#include "core/refusal.h"
#include "core/registry.h"
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

namespace {

void require_experts(std::int64_t num_experts) {
  if (num_experts < 1) {
    refuse_value("num_experts is ", num_experts, "; it must be at least 1");
  }
}

/// Written by `route`: [M] of the dtype of m_sizes.
void require_route_output(const Argument& output, const Argument& m_sizes, std::int64_t rows) {
  require_form(output, {{1, "[M]"}});
  require_same_dtype(output, m_sizes);
  require_same_device(output, m_sizes);
  require_shape(output, {rows}, "[M]");
}

}  // namespace

void route(const TensorView& expert_ids_view, std::int64_t num_experts,
           const TensorView& m_sizes_view, const TensorView& gather_indices_view,
           const TensorView& inverse_view, void* workspace, const ExecutionContext& context) {
  const Argument expert_ids{"expert_ids", expert_ids_view};
  const Argument m_sizes{"m_sizes", m_sizes_view};
  const Argument gather_indices{"gather_indices", gather_indices_view};
  const Argument inverse{"inverse", inverse_view};
  require_form(expert_ids, {{2, "[T, topk]"}});
  require_index(expert_ids);
  require_extent(expert_ids, expert_ids_view.shape[1], "topk, its last dimension,");
  require_topk(expert_ids_view.shape[1]);
  require_experts(num_experts);
  require_sizes(m_sizes, expert_ids);
  require_shape(m_sizes, {num_experts}, "[E]");
  const std::int64_t rows = expert_ids_view.numel();
  if (m_sizes_view.dtype == DType::kInt32 && rows > INT32_MAX) {
    refuse_value("gather_indices is int32, but M = ", rows, " rows need int64 indices");
  }
  require_route_output(gather_indices, m_sizes, rows);
  if (inverse_view.given()) require_route_output(inverse, m_sizes, rows);
  const Argument* const all[] = {&expert_ids, &m_sizes, &gather_indices, &inverse};
  for (const Argument* argument : all) require_memory(*argument);
  for (const Argument* const* output = all + 1; output != std::end(all); ++output) {
    for (const Argument* const* other = all; other != output; ++other) {
      require_disjoint(**output, **other);
    }
  }
  const Device device = expert_ids_view.device;
  const Passes& passes = passes_for(device);
  if (workspace == nullptr && passes.route_workspace_bytes(rows, num_experts) > 0) {
    refuse_value("workspace is null; on ", to_string(device), " route needs ",
                 passes.route_workspace_bytes(rows, num_experts), " bytes of device memory");
  }
  passes.route(expert_ids_view, num_experts, m_sizes_view, gather_indices_view, inverse_view,
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
  require_form(out, {{2, "[T, C]"}});
  require_dtype_or_float32(out, rows);
  require_same_device(out, rows);
  require_shape(out, {count / topk, rows_view.shape[1]}, "[T, C]");
  require_memory(out);
  for (const Argument* input : {&rows, &weights}) {
    require_memory(*input);
    require_disjoint(out, *input);
  }
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
  const Argument m_sizes{"m_sizes", routing.m_sizes};
  const Argument indices{"gather_indices", routing.gather_indices};
  const Argument weights{"router_weights", routing.router_weights};
  require_topk(routing.topk);
  require_form(x, {{2, "[M, K]"}});
  require_floating(x);
  const std::int64_t rows = x_view.shape[0];
  const auto require_like_x = [&](const Argument& argument) {
    require_form(argument, {{2, "[M, K]"}});
    require_dtype_or_float32(argument, x);
    require_same_device(argument, x);
    require_shape(argument, {rows, x_view.shape[1]}, "[M, K]");
  };
  require_like_x(product);
  require_like_x(scaled);

  require_sizes(m_sizes, x);
  require_indices(indices, x);
  require_shape(indices, {rows}, "[M]");
  require_router_weights(weights, x, rows, routing.topk);
  require_form(dot, {{1, "[M]"}});
  require_dtype_or_float32(dot, x);
  require_same_device(dot, x);
  require_shape(dot, {rows}, "[M]");
  if (scaled_x_view.given()) {
    require_like_x(scaled_x);
    require_same_dtype(scaled_x, x);
  }

  const Argument* const all[] = {&product, &x,      &m_sizes, &indices,
                                 &weights, &scaled, &dot,     &scaled_x};
  for (const Argument* argument : all) require_memory(*argument);
  require_dense(weights);
  // `scaled` may be `product` itself: each element is read before it is written.
  const bool in_place = scaled_view.data == product_view.data &&
                        scaled_view.dtype == product_view.dtype &&
                        scaled_view.row_stride == product_view.row_stride;
  for (const Argument* output : {&scaled, &dot, &scaled_x}) {
    for (const Argument* other : all) {
      const bool allowed = in_place && output == &scaled && other == &product;
      if (output != other && !allowed) require_disjoint(*output, *other);
    }
  }
  passes_for(product_view.device)
      .scale_rows(product_view, x_view, routing, scaled_view, dot_view, scaled_x_view, context);
}

}  // namespace moegemm
