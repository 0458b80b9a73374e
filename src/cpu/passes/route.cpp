#include <vector>

#include "cpu/passes/passes.h"

namespace moegemm::cpu {
namespace {

/// Ids outside [0, experts) share one bin after all experts.
template <typename Id>
std::int64_t bin_of(Id id, std::int64_t experts) {
  return id >= 0 && static_cast<std::int64_t>(id) < experts ? static_cast<std::int64_t>(id)
                                                            : experts;
}

template <typename Id, typename Index>
void sort_by_expert(const TensorView& expert_ids, std::int64_t experts, Index* m_sizes,
                    Index* gather_indices, Index* inverse) {
  const std::int64_t tokens = expert_ids.shape[0];
  const std::int64_t topk = expert_ids.shape[1];
  const auto ids_of = [&](std::int64_t token) {
    return static_cast<const Id*>(expert_ids.data) + token * expert_ids.row_stride;
  };
  std::vector<std::int64_t> next(experts + 1, 0);  // first count, then next free position
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t s = 0; s < topk; ++s) ++next[bin_of(ids_of(t)[s], experts)];
  }
  std::int64_t begin = 0;
  for (std::int64_t e = 0; e <= experts; ++e) {
    const std::int64_t count = next[e];
    if (e < experts) m_sizes[e] = static_cast<Index>(count);
    next[e] = begin;
    begin += count;
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t s = 0; s < topk; ++s) {
      const std::int64_t flat = t * topk + s;
      const std::int64_t position = next[bin_of(ids_of(t)[s], experts)]++;
      gather_indices[position] = static_cast<Index>(flat);
      if (inverse != nullptr) inverse[flat] = static_cast<Index>(position);
    }
  }
}

template <typename Id>
void sort_ids(const TensorView& expert_ids, std::int64_t experts, const TensorView& m_sizes,
              const TensorView& gather_indices, const TensorView& inverse) {
  if (m_sizes.dtype == DType::kInt32) {
    sort_by_expert<Id>(expert_ids, experts, static_cast<std::int32_t*>(m_sizes.data),
                       static_cast<std::int32_t*>(gather_indices.data),
                       static_cast<std::int32_t*>(inverse.data));
  } else {
    sort_by_expert<Id>(expert_ids, experts, static_cast<std::int64_t*>(m_sizes.data),
                       static_cast<std::int64_t*>(gather_indices.data),
                       static_cast<std::int64_t*>(inverse.data));
  }
}

}  // namespace

/// A stable counting sort of the flat rows by expert.
void CpuPasses::route(const TensorView& expert_ids, std::int64_t experts, const TensorView& m_sizes,
                      const TensorView& gather_indices, const TensorView& inverse, void*,
                      const ExecutionContext&) const {
  if (expert_ids.dtype == DType::kInt32) {
    sort_ids<std::int32_t>(expert_ids, experts, m_sizes, gather_indices, inverse);
  } else {
    sort_ids<std::int64_t>(expert_ids, experts, m_sizes, gather_indices, inverse);
  }
}

std::int64_t CpuPasses::route_workspace_bytes(std::int64_t, std::int64_t) const { return 0; }

std::optional<RoutingFault> CpuPasses::check(const RoutingView& routing, std::int64_t rows,
                                             std::int64_t flat_rows,
                                             const ExecutionContext&) const {
  return find_routing_fault(routing, rows, flat_rows);
}

}  // namespace moegemm::cpu
