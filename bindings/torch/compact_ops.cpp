#include "moegemm/compact.h"
#include "moegemm/routing.h"
#include "operators.h"
#include "runtime/execution.h"

namespace moegemm::torch_ops {

std::tuple<Tensor, Tensor, Tensor> route_compact(const Tensor& expert_ids, std::int64_t experts,
                                                 std::int64_t max_rows,
                                                 const std::optional<Tensor>& num_tokens,
                                                 const std::optional<Tensor>& overflow, bool wide,
                                                 bool check) {
  return raising([&] {
    Argument ids("expert_ids", expert_ids), tokens("num_tokens", num_tokens);
    Argument flag("overflow", overflow);
    ids.require_rank(2, "[T, topk]");
    ids.require_index();
    if (experts < 1) refuse_value("num_experts is ", experts, "; it must be at least 1");
    if (max_rows < 0) refuse_value("max_rows is ", max_rows, "; it must not be negative");
    const std::int64_t slots = ids.numel();
    const Device device = ids.device();
    const DType dtype = wide ? DType::kInt64 : DType::kInt32;
    RouteLimits limits;
    limits.check = check;
    if (tokens.given()) limits.num_tokens = tokens.readable();
    if (flag.given()) limits.overflow = flag.writable();
    const TensorView& readable_ids = ids.readable();
    const Execution execution(device, static_cast<double>(slots));
    Output m_sizes = allocate({experts}, dtype, device);
    Output gather_indices = allocate({max_rows}, dtype, device);
    Output positions = allocate({ids.size(0), ids.size(1)}, dtype, device);
    const Tensor workspace = allocate_bytes(route_workspace_bytes(slots, experts, device), device);
    moegemm::route_compact(readable_ids, experts, m_sizes.view, gather_indices.view, positions.view,
                           limits, workspace.mutable_data_ptr(), execution.context());
    return std::make_tuple(m_sizes.hand_over(), gather_indices.hand_over(), positions.hand_over());
  });
}

Tensor combine_rows(const Tensor& rows, const std::optional<Tensor>& weights,
                    const Tensor& positions, bool float32_output) {
  return raising([&] {
    Argument input("rows", rows), scales("weights", weights), places("positions", positions);
    input.require_rank(2, "[R, C]");
    places.require_rank(2, "[T, topk]");
    if (scales.given() && scales.numel() != places.numel()) {
      refuse_value("weights is ", scales.describe(),
                   "; its shape must be that of positions, [T, topk] = [", places.size(0), ", ",
                   places.size(1), "]");
    }
    const TensorView readable_rows = input.readable();
    const TensorView readable_weights = scales.given() ? scales.readable_vector() : TensorView{};
    TensorView dense = places.readable_vector();
    dense = TensorView::matrix(dense.data, dense.dtype, places.size(0), places.size(1), 0,
                               dense.device);
    const Execution execution(input.device(), 2.0 * static_cast<double>(input.numel()));
    Output out = allocate({places.size(0), input.size(1)},
                          float32_output ? DType::kFloat32 : input.dtype(), input.device());
    moegemm::combine_rows(readable_rows, readable_weights, dense, out.view, execution.context());
    return out.hand_over();
  });
}

}  // namespace moegemm::torch_ops
