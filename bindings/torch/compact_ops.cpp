#include "arguments.h"
#include "moegemm/compact.h"
#include "moegemm/passes.h"
#include "registration.h"
#include "runtime/execution.h"

namespace moegemm::torch_ops {
namespace {

/// m_sizes, gather_indices [max_rows] and positions [T, topk]; see moegemm::route_compact.
std::tuple<Tensor, Tensor, Tensor> route_compact(const Tensor& expert_ids, std::int64_t num_experts,
                                                 std::int64_t max_rows,
                                                 const std::optional<Tensor>& num_tokens,
                                                 const std::optional<Tensor>& overflow, bool wide,
                                                 bool check) {
  return raising([&] {
    if (max_rows < 0) refuse_value("max_rows is ", max_rows, "; it must not be negative");
    Argument ids("expert_ids", expert_ids), tokens("num_tokens", num_tokens);
    Argument flag("overflow", overflow);
    const std::int64_t slots = ids.numel();
    const Device device = ids.device();
    const DType dtype = wide ? DType::kInt64 : DType::kInt32;
    const TensorView& readable_ids = ids.readable();
    RouteLimits limits;
    limits.num_tokens = tokens.readable();
    if (flag.given()) limits.overflow = flag.writable();
    limits.check = check;
    const Execution execution(device, static_cast<double>(slots));
    Output m_sizes = allocate(num_experts, dtype, device);
    Output gather_indices = allocate(max_rows, dtype, device);
    Output positions = allocate(ids.size(0), ids.columns(), dtype, device);
    const Tensor workspace = allocate_bytes(
        num_experts < 1 ? 0 : route_workspace_bytes(slots, num_experts, device), device);
    moegemm::route_compact(readable_ids, num_experts, m_sizes.view, gather_indices.view,
                           positions.view, limits, workspace.mutable_data_ptr(),
                           execution.context());
    return std::make_tuple(m_sizes.hand_over(), gather_indices.hand_over(), positions.hand_over());
  });
}

Tensor combine_rows(const Tensor& rows, const std::optional<Tensor>& weights,
                    const Tensor& positions, bool float32_output) {
  return raising([&] {
    Argument input("rows", rows), factors("weights", weights), places("positions", positions);
    const TensorView& readable_rows = input.readable();
    const TensorView& readable_weights = factors.readable_dense();
    const TensorView& readable_positions = places.readable_dense();
    const Execution execution(input.device(), 2.0 * static_cast<double>(input.numel()));
    Output out = allocate(places.size(0), input.columns(),
                          float32_output ? DType::kFloat32 : input.dtype(), input.device());
    moegemm::combine_rows(readable_rows, readable_weights, readable_positions, out.view,
                          execution.context());
    return out.hand_over();
  });
}

void combine_rows_out(const Tensor& rows, const std::optional<Tensor>& weights,
                      const Tensor& positions, const Tensor& out) {
  raising([&] {
    Argument input("rows", rows), factors("weights", weights), places("positions", positions);
    Argument target("out", out);
    const TensorView& readable_rows = input.readable();
    const TensorView& readable_weights = factors.readable_dense();
    const TensorView& readable_positions = places.readable_dense();
    const Execution execution(input.device(), 2.0 * static_cast<double>(input.numel()));
    moegemm::combine_rows(readable_rows, readable_weights, readable_positions, target.writable(),
                          execution.context());
  });
}

constexpr Operator kOperators[] = {
    {"route_compact(Tensor expert_ids, int num_experts, SymInt max_rows, Tensor? num_tokens, "
     "Tensor(a!)? overflow, bool wide, bool check) -> (Tensor, Tensor, Tensor)",
     TORCH_BOX(&route_compact)},
    {"combine_rows(Tensor rows, Tensor? weights, Tensor positions, bool float32_output) -> Tensor",
     TORCH_BOX(&combine_rows)},
    {"combine_rows_out(Tensor rows, Tensor? weights, Tensor positions, Tensor(a!) out) -> ()",
     TORCH_BOX(&combine_rows_out)},
};

}  // namespace

MOEGEMM_REGISTER(kOperators)

}  // namespace moegemm::torch_ops
