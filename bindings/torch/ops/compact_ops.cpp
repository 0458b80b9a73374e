#include <limits>

#include "arguments.h"
#include "moegemm/passes.h"
#include "registration.h"
#include "runtime/execution.h"

namespace moegemm::torch_ops {
namespace {

/// topk of ids [T, topk]; 0 of others, which the library refuses.
std::int64_t topk_of(const Argument& ids) { return ids.metadata().rank == 2 ? ids.columns() : 0; }

/// m_sizes, gather_indices [max_rows] and positions [T, topk]; see moegemm::route_compact.
std::tuple<Tensor, Tensor, Tensor> route_compact(const Tensor& expert_ids, std::int64_t num_experts,
                                                 std::int64_t max_rows,
                                                 const std::optional<Tensor>& num_tokens,
                                                 const std::optional<Tensor>& overflow, bool wide,
                                                 bool check) {
  return raising([&] {
    if (max_rows < 0) refuse_value("max_rows is ", max_rows, "; it must not be negative");
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    if (!wide && max_rows > kMost) {
      refuse_value("max_rows is ", max_rows, "; gather_indices is int32, so that at most ", kMost,
                   " rows are accepted");
    }
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
    Output positions = allocate(ids.size(0), topk_of(ids), dtype, device);
    const Tensor workspace = allocate_bytes(
        num_experts < 1 ? 0 : route_workspace_bytes(slots, num_experts, device), device);
    moegemm::route_compact(readable_ids, num_experts, m_sizes.view, gather_indices.view,
                           positions.view, limits, workspace.mutable_data_ptr(),
                           execution.context());
    return std::make_tuple(m_sizes.hand_over(), gather_indices.hand_over(), positions.hand_over());
  });
}

/// rows_pending: LaunchAhead::kWritesRows.
void combine_rows_into(Argument& rows, const std::optional<Tensor>& weights, Argument& positions,
                       const TensorView& out, bool rows_pending) {
  Argument factors("weights", weights);
  const TensorView& readable_rows = rows.readable();
  const TensorView& readable_weights = factors.readable_dense();
  const TensorView& readable_positions = positions.readable_dense();
  const Execution execution(rows.device(), 2.0 * static_cast<double>(rows.numel()));
  const bool copied = rows.copied() || factors.copied() || positions.copied();
  moegemm::combine_rows(readable_rows, readable_weights, readable_positions, out,
                        execution.context(LaunchAhead::kWritesRows, rows_pending && !copied));
}

Tensor combine_rows(const Tensor& rows, const std::optional<Tensor>& weights,
                    const Tensor& positions, bool float32_output) {
  return raising([&] {
    Argument input("rows", rows), places("positions", positions);
    Output out = allocate(places.size(0), input.columns(),
                          float32_output ? DType::kFloat32 : input.dtype(), input.device());
    combine_rows_into(input, weights, places, out.view, false);
    return out.hand_over();
  });
}

void combine_rows_out(const Tensor& rows, const std::optional<Tensor>& weights,
                      const Tensor& positions, const Tensor& out, bool rows_pending) {
  raising([&] {
    Argument input("rows", rows), places("positions", positions), target("out", out);
    combine_rows_into(input, weights, places, target.writable(), rows_pending);
  });
}

/// `count` rows, of which positions name all, or gather_indices tell which they do not.
Tensor spread_rows(const Tensor& rows, const Tensor& positions,
                   const std::optional<Tensor>& gather_indices, std::int64_t count) {
  return raising([&] {
    if (count < 0) refuse_value("count is ", count, "; it must not be negative");
    Argument input("rows", rows), places("positions", positions);
    Argument indices("gather_indices", gather_indices);
    const TensorView& readable_rows = input.readable();
    const TensorView& readable_positions = places.readable_dense();
    const TensorView& readable_indices = indices.readable_dense();
    const Execution execution(input.device(), static_cast<double>(count * input.columns()));
    Output out = allocate(count, input.columns(), input.dtype(), input.device());
    moegemm::spread_rows(readable_rows, readable_positions, readable_indices, out.view,
                         execution.context());
    return out.hand_over();
  });
}

/// ranks_of_slots and pairs; see moegemm::first_slots.
std::tuple<Tensor, Tensor> first_slots(const Tensor& expert_ids, std::int64_t experts_of_rank,
                                       std::int64_t ranks) {
  return raising([&] {
    if (ranks < 1) refuse_value("ranks is ", ranks, "; it must be at least 1");
    Argument input("expert_ids", expert_ids);
    const Device device = input.device();
    const TensorView& readable = input.readable_dense();
    const Execution execution(device, static_cast<double>(input.numel()));
    Output found = allocate(input.size(0), topk_of(input), DType::kInt64, device);
    Output pairs = allocate(ranks, DType::kInt64, device);
    moegemm::first_slots(readable, experts_of_rank, found.view, pairs.view, execution.context());
    return std::make_tuple(found.hand_over(), pairs.hand_over());
  });
}

Tensor ids_at_target(const Tensor& expert_ids, const Tensor& gather_indices,
                     std::int64_t experts_of_rank) {
  return raising([&] {
    Argument input("expert_ids", expert_ids), indices("gather_indices", gather_indices);
    const TensorView& readable = input.readable_dense();
    const TensorView& readable_indices = indices.readable_dense();
    const Execution execution(input.device(), static_cast<double>(indices.numel()));
    Output ids = allocate(indices.size(0), topk_of(input), DType::kInt64, input.device());
    moegemm::ids_at_target(readable, readable_indices, experts_of_rank, ids.view,
                           execution.context());
    return ids.hand_over();
  });
}

/// m_sizes [E] and gather_indices [rows], int32, and expert_ids [rows]; see
/// moegemm::index_arrivals.
std::tuple<Tensor, Tensor, Tensor> index_arrivals(const Tensor& counts, std::int64_t rows,
                                                  std::int64_t room) {
  return raising([&] {
    if (rows < 0) refuse_value("rows is ", rows, "; it must not be negative");
    Argument input("counts", counts);
    const Device device = input.device();
    const TensorView& readable = input.readable();
    const Execution execution(device, static_cast<double>(rows));
    Output m_sizes = allocate(input.columns(), DType::kInt32, device);
    Output gather_indices = allocate(rows, DType::kInt32, device);
    Output ids = allocate(rows, DType::kInt64, device);
    moegemm::index_arrivals(readable, room, m_sizes.view, gather_indices.view, ids.view,
                            execution.context());
    return std::make_tuple(m_sizes.hand_over(), gather_indices.hand_over(), ids.hand_over());
  });
}

constexpr Operator kOperators[] = {
    {"route_compact(Tensor expert_ids, int num_experts, SymInt max_rows, Tensor? num_tokens, "
     "Tensor(a!)? overflow, bool wide, bool check) -> (Tensor, Tensor, Tensor)",
     TORCH_BOX(&route_compact)},
    {"combine_rows(Tensor rows, Tensor? weights, Tensor positions, bool float32_output) -> Tensor",
     TORCH_BOX(&combine_rows)},
    {"combine_rows_out(Tensor rows, Tensor? weights, Tensor positions, Tensor(a!) out, "
     "bool rows_pending=False) -> ()",
     TORCH_BOX(&combine_rows_out)},
    {"spread_rows(Tensor rows, Tensor positions, Tensor? gather_indices, SymInt count) -> Tensor",
     TORCH_BOX(&spread_rows)},
    {"first_slots(Tensor expert_ids, int experts_of_rank, int ranks) -> (Tensor, Tensor)",
     TORCH_BOX(&first_slots)},
    {"ids_at_target(Tensor expert_ids, Tensor gather_indices, int experts_of_rank) -> Tensor",
     TORCH_BOX(&ids_at_target)},
    {"index_arrivals(Tensor counts, SymInt rows, SymInt room) -> (Tensor, Tensor, Tensor)",
     TORCH_BOX(&index_arrivals)},
};

}  // namespace

MOEGEMM_REGISTER(kOperators)

}  // namespace moegemm::torch_ops
