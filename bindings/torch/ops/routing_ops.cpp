#include <algorithm>

#include "moegemm/passes.h"
#include "registration.h"
#include "routing_arguments.h"
#include "runtime/execution.h"

namespace moegemm::torch_ops {
namespace {

/// m_sizes, gather_indices and (empty unless asked for) the inverse permutation.
std::tuple<Tensor, Tensor, Tensor> route(const Tensor& expert_ids, std::int64_t num_experts,
                                         bool wide, bool with_inverse) {
  return raising([&] {
    Argument ids("expert_ids", expert_ids);
    const std::int64_t rows = ids.numel();
    const Device device = ids.device();
    const DType dtype = wide ? DType::kInt64 : DType::kInt32;
    const TensorView& readable_ids = ids.readable();
    const Execution execution(device, static_cast<double>(rows));
    Output m_sizes = allocate(num_experts, dtype, device);
    Output gather_indices = allocate(rows, dtype, device);
    Output inverse = allocate(with_inverse ? rows : 0, dtype, device);
    const Tensor workspace = allocate_bytes(
        num_experts < 1 ? 0 : route_workspace_bytes(rows, num_experts, device), device);
    moegemm::route(readable_ids, num_experts, m_sizes.view, gather_indices.view,
                   with_inverse ? inverse.view : TensorView{}, workspace.mutable_data_ptr(),
                   execution.context());
    return std::make_tuple(m_sizes.hand_over(), gather_indices.hand_over(), inverse.hand_over());
  });
}

void combine_into(Argument& rows, const std::optional<Tensor>& weights, std::int64_t topk,
                  const TensorView& out) {
  Argument factors("weights", weights);
  const TensorView& readable_rows = rows.readable();
  const TensorView& readable_weights = factors.readable_dense();
  const Execution execution(rows.device(), 2.0 * static_cast<double>(rows.numel()));
  moegemm::combine(readable_rows, readable_weights, topk, out, execution.context());
}

Tensor combine(const Tensor& rows, const std::optional<Tensor>& weights, std::int64_t topk,
               bool float32_output) {
  return raising([&] {
    Argument input("rows", rows);
    Output out = allocate(topk < 1 ? 0 : input.size(0) / topk, input.columns(),
                          float32_output ? DType::kFloat32 : input.dtype(), input.device());
    combine_into(input, weights, topk, out.view);
    return out.hand_over();
  });
}

void combine_out(const Tensor& rows, const std::optional<Tensor>& weights, std::int64_t topk,
                 const Tensor& out) {
  raising([&] {
    Argument input("rows", rows), target("out", out);
    combine_into(input, weights, topk, target.writable());
  });
}

/// Scales `product` in place and returns the dot products; see moegemm::scale_rows.
Tensor scale_rows(const Tensor& product, const Tensor& x, const Tensor& m_sizes,
                  const Tensor& gather_indices, const Tensor& router_weights, std::int64_t topk) {
  return raising([&] {
    Argument target("product", product), rows("x", x);
    RoutingArguments routing(m_sizes, gather_indices, router_weights, topk);
    const RoutingView readable_routing = routing.readable();
    const TensorView& readable_rows = rows.readable();
    const TensorView& in_place = target.writable();
    const Execution execution(target.device(), 3.0 * static_cast<double>(target.numel()));
    Output dot = allocate(target.size(0), readable_routing.router_weights.dtype, target.device());
    moegemm::scale_rows(in_place, readable_rows, readable_routing, in_place, dot.view, {},
                        execution.context());
    return dot.hand_over();
  });
}

constexpr Operator kOperators[] = {
    {"route(Tensor expert_ids, int num_experts, bool wide, bool with_inverse) -> "
     "(Tensor, Tensor, Tensor)",
     TORCH_BOX(&route)},
    {"combine(Tensor rows, Tensor? weights, int topk, bool float32_output) -> Tensor",
     TORCH_BOX(&combine)},
    {"combine_out(Tensor rows, Tensor? weights, int topk, Tensor(a!) out) -> ()",
     TORCH_BOX(&combine_out)},
    {"scale_rows(Tensor(a!) product, Tensor x, Tensor m_sizes, Tensor gather_indices, "
     "Tensor router_weights, int topk) -> Tensor",
     TORCH_BOX(&scale_rows)},
};

}  // namespace

MOEGEMM_REGISTER(kOperators)

}  // namespace moegemm::torch_ops
