#include "moegemm/routing.h"

#include "core/refusal.h"
#include "core/registry.h"
#include "core/validation/tensor_rules.h"

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

/// Written by `route`: dense, of the dtype of m_sizes.
void require_route_output(const Argument& output, const Argument& m_sizes, std::int64_t length,
                          const char* meaning) {
  require_tensor(output, {1});
  require_same_dtype(output, m_sizes);
  require_same_device(output, m_sizes);
  require_shape(output, {length}, meaning);
}

}  // namespace

void route(const TensorView& expert_ids_view, std::int64_t experts, const TensorView& m_sizes_view,
           const TensorView& gather_indices_view, const TensorView& inverse_view, void* workspace,
           const ExecutionContext& context) {
  const Argument expert_ids{"expert_ids", expert_ids_view};
  const Argument m_sizes{"m_sizes", m_sizes_view};
  const Argument gather_indices{"gather_indices", gather_indices_view};
  const Argument inverse{"inverse", inverse_view};
  if (experts < 1) refuse_value("experts is ", experts, "; it must be at least 1");
  require_tensor(expert_ids, {2});
  require_index(expert_ids);
  require_tensor(m_sizes, {1});
  require_index(m_sizes);
  require_same_device(m_sizes, expert_ids);
  require_shape(m_sizes, {experts}, "[E]");
  require_topk(expert_ids_view.shape[1]);
  const std::int64_t rows = expert_ids_view.numel();
  if (m_sizes_view.dtype == DType::kInt32 && rows > INT32_MAX) {
    refuse_value("gather_indices is int32, but M = ", rows, " rows need int64 indices");
  }
  require_route_output(gather_indices, m_sizes, rows, "[M]");
  require_disjoint(gather_indices, expert_ids);
  require_disjoint(gather_indices, m_sizes);
  require_disjoint(m_sizes, expert_ids);
  if (inverse_view.given()) {
    require_route_output(inverse, m_sizes, rows, "[M]");
    require_disjoint(inverse, expert_ids);
    require_disjoint(inverse, m_sizes);
    require_disjoint(inverse, gather_indices);
  }
  const Device device = expert_ids_view.device;
  const Passes& passes = passes_for(device);
  if (workspace == nullptr && passes.route_workspace_bytes(rows, experts) > 0) {
    refuse_value("workspace is null; on ", to_string(device), " route needs ",
                 passes.route_workspace_bytes(rows, experts), " bytes of device memory");
  }
  passes.route(expert_ids_view, experts, m_sizes_view, gather_indices_view, inverse_view, workspace,
               context);
}

std::int64_t route_workspace_bytes(std::int64_t rows, std::int64_t experts, Device device) {
  if (rows < 0) refuse_value("rows is ", rows, "; it must not be negative");
  if (experts < 1) refuse_value("experts is ", experts, "; it must be at least 1");
  return passes_for(device).route_workspace_bytes(rows, experts);
}

namespace {

/// Everything of a combine but the bias.
void check_combine(const TensorView& rows_view, const TensorView& weights_view, std::int64_t topk,
                   const TensorView& out_view) {
  const Argument rows{"rows", rows_view};
  const Argument weights{"weights", weights_view};
  const Argument out{"out", out_view};
  require_topk(topk);
  require_tensor(rows, {2});
  require_floating(rows);
  const std::int64_t count = rows_view.shape[0];
  if (count % topk != 0) {
    refuse_value("rows has ", count, " rows; it must have a multiple of topk = ", topk);
  }
  require_tensor(out, {2});
  require_dtype_or_float32(out, rows);
  require_same_device(out, rows);
  require_shape(out, {count / topk, rows_view.shape[1]}, "[T, C]");
  require_disjoint(out, rows);
  if (weights_view.given()) {
    require_row_weights(weights, rows, count, topk);
    require_disjoint(out, weights);
  }
}

}  // namespace

void combine(const TensorView& rows, const TensorView& weights, std::int64_t topk,
             const TensorView& out, const ExecutionContext& context) {
  check_combine(rows, weights, topk, out);
  passes_for(rows.device).combine(rows, weights, {}, topk, out, context);
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
  const Argument weights{"topk_weights", routing.topk_weights};
  require_topk(routing.topk);
  require_tensor(x, {2});
  require_floating(x);
  const std::int64_t rows = x_view.shape[0];
  const std::int64_t cols = x_view.shape[1];
  const auto require_like_x = [&](const Argument& argument) {
    require_tensor(argument, {2});
    require_dtype_or_float32(argument, x);
    require_same_device(argument, x);
    require_shape(argument, {rows, cols}, "[M, K]");
  };
  require_like_x(product);
  require_like_x(scaled);

  require_tensor(m_sizes, {1});
  require_index(m_sizes);
  require_same_device(m_sizes, x);
  if (routing.m_sizes.shape[0] < 1) refuse_value("m_sizes is empty; E must be at least 1");
  require_tensor(indices, {1});
  require_index(indices);
  require_same_device(indices, x);
  require_shape(indices, {rows}, "[M]");
  require_row_weights(weights, x, rows, routing.topk);

  require_tensor(dot, {1});
  require_dtype_or_float32(dot, x);
  require_same_device(dot, x);
  require_shape(dot, {rows}, "[M]");

  // `scaled` may be `product` itself: each element is read before it is written.
  const bool in_place = scaled_view.data == product_view.data &&
                        scaled_view.dtype == product_view.dtype &&
                        scaled_view.row_stride == product_view.row_stride;
  if (!in_place) require_disjoint(scaled, product);
  for (const Argument* input : {&x, &m_sizes, &indices, &weights}) {
    require_disjoint(scaled, *input);
    require_disjoint(dot, *input);
  }
  require_disjoint(dot, product);
  require_disjoint(dot, scaled);
  if (scaled_x_view.given()) {
    require_like_x(scaled_x);
    require_same_dtype(scaled_x, x);
    for (const Argument* other : {&product, &x, &m_sizes, &indices, &weights, &scaled, &dot}) {
      require_disjoint(scaled_x, *other);
    }
  }
  passes_for(product_view.device)
      .scale_rows(product_view, x_view, routing, scaled_view, dot_view, scaled_x_view, context);
}

}  // namespace moegemm
