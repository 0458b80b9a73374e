#include "gemm_rules.h"
#include "moegemm/routing.h"
#include "operators.h"
#include "runtime/execution.h"

namespace moegemm::torch_ops {
namespace {

void require_topk(std::int64_t topk) {
  if (topk < 1) refuse_value("topk is ", topk, "; it must be at least 1");
}

/// The T of [T * topk, ...].
std::int64_t tokens_of(const Argument& rows, std::int64_t topk) {
  require_topk(topk);
  if (rows.size(0) % topk != 0) {
    refuse_value(rows.name(), " is ", rows.describe(),
                 "; its rows must be a multiple of topk = ", topk);
  }
  return rows.size(0) / topk;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> route(const Tensor& expert_ids, std::int64_t experts, bool wide,
                                         bool with_inverse) {
  return raising([&] {
    Argument ids("expert_ids", expert_ids);
    ids.require_rank(2, "[T, topk]");
    ids.require_index();
    if (experts < 1) refuse_value("num_experts is ", experts, "; it must be at least 1");
    if (ids.size(1) < 1) {
      refuse_value("expert_ids is ", ids.describe(),
                   "; topk, its last dimension, must be at least 1");
    }
    const std::int64_t rows = ids.numel();
    const Device device = ids.device();
    const DType dtype = wide ? DType::kInt64 : DType::kInt32;
    const TensorView& readable_ids = ids.readable();
    const Execution execution(device, static_cast<double>(rows));
    Output m_sizes = allocate({experts}, dtype, device);
    Output gather_indices = allocate({rows}, dtype, device);
    Output inverse = allocate({with_inverse ? rows : 0}, dtype, device);
    const Tensor workspace = allocate_bytes(route_workspace_bytes(rows, experts, device), device);
    moegemm::route(readable_ids, experts, m_sizes.view, gather_indices.view,
                   with_inverse ? inverse.view : TensorView{}, workspace.mutable_data_ptr(),
                   execution.context());
    return std::make_tuple(m_sizes.hand_over(), gather_indices.hand_over(), inverse.hand_over());
  });
}

Tensor combine(const Tensor& rows, const std::optional<Tensor>& weights, std::int64_t topk,
               bool float32_output) {
  return raising([&] {
    Argument input("rows", rows);
    input.require_rank(2, "[M, C]");
    input.require_floating();
    const std::int64_t tokens = tokens_of(input, topk);
    Argument scales("weights", weights);
    if (scales.given()) {
      scales.require_dtype_or_float32(input);
      scales.require_same_device(input);
      const bool shaped = scales.rank() == 1 || (scales.rank() == 2 && scales.size(1) == topk);
      if (!shaped || scales.numel() != input.size(0)) {
        refuse_value("weights is ", scales.describe(),
                     "; its shape must be [M] or [T, topk] with M = ", input.size(0),
                     " and topk = ", topk);
      }
    }
    const TensorView& readable_rows = input.readable();
    const TensorView readable_weights = scales.given() ? scales.readable_vector() : TensorView{};
    const Execution execution(input.device(), 2.0 * static_cast<double>(input.numel()));
    Output out = allocate({tokens, input.size(1)}, float32_output ? DType::kFloat32 : input.dtype(),
                          input.device());
    moegemm::combine(readable_rows, readable_weights, topk, out.view, execution.context());
    return out.hand_over();
  });
}

Tensor scale_rows(const Tensor& product, const Tensor& x, const Tensor& m_sizes,
                  const Tensor& gather_indices, const Tensor& topk_weights, std::int64_t topk) {
  return raising([&] {
    require_topk(topk);
    Argument target("product", product);
    Argument rows("X", x);
    for (const Argument* argument : {&target, &rows}) {
      argument->require_rank(2, "[M, K]");
      argument->require_floating();
    }
    rows.require_same_device(target);
    if (rows.size(0) != target.size(0) || rows.size(1) != target.size(1)) {
      refuse_value("X is ", rows.describe(), "; it must have the shape of product, ",
                   target.describe());
    }
    RoutingArguments routing{Argument("m_sizes", m_sizes),
                             Argument("gather_indices", gather_indices),
                             Argument("topk_weights", topk_weights), topk};
    for (const Argument* argument :
         {&routing.m_sizes, &routing.gather_indices, &routing.topk_weights}) {
      argument->require_same_device(target);
    }
    if (routing.topk_weights.numel() != target.size(0)) {
      refuse_value("topk_weights is ", routing.topk_weights.describe(),
                   "; it must have M = ", target.size(0), " elements");
    }
    const RoutingView readable_routing = routing.readable();
    const TensorView& readable_rows = rows.readable();
    const TensorView& in_place = target.writable();
    const Execution execution(target.device(), 3.0 * static_cast<double>(target.numel()));
    Output dot = allocate({target.size(0)}, routing.topk_weights.dtype(), target.device());
    moegemm::scale_rows(in_place, readable_rows, readable_routing, in_place, dot.view, {},
                        execution.context());
    return dot.hand_over();
  });
}

}  // namespace moegemm::torch_ops
