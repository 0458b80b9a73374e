#include <algorithm>
#include <vector>

#include "cpu/passes/passes.h"
#include "cpu/routing_data.h"

namespace moegemm::cpu {
namespace {

std::int64_t counted_tokens(const TensorView& expert_ids, const TensorView& num_tokens) {
  const std::int64_t tokens = expert_ids.shape[0];
  if (!num_tokens.given()) return tokens;
  return std::clamp<std::int64_t>(read_index(num_tokens.data, num_tokens.dtype, 0), 0, tokens);
}

}  // namespace

void CpuPasses::route_compact(const TensorView& expert_ids, std::int64_t experts,
                              const TensorView& m_sizes, const TensorView& gather_indices,
                              const TensorView& positions, const RouteLimits& limits, void*,
                              const ExecutionContext&) const {
  const std::int64_t topk = expert_ids.shape[1];
  const std::int64_t counted = counted_tokens(expert_ids, limits.num_tokens) * topk;
  const std::int64_t capacity = gather_indices.shape[0];
  const DType dtype = m_sizes.dtype;
  const auto expert_of = [&](std::int64_t flat) {
    const std::int64_t at = flat / topk * expert_ids.row_stride + flat % topk;
    const std::int64_t id = read_index(expert_ids.data, expert_ids.dtype, at);
    return id >= 0 && id < experts ? id : -1;
  };
  std::vector<std::int64_t> next(experts, 0);  // first count, then next free position
  for (std::int64_t flat = 0; flat < counted; ++flat) {
    const std::int64_t expert = expert_of(flat);
    if (expert >= 0) ++next[expert];
  }
  std::int64_t begin = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    const std::int64_t end = begin + next[e];
    next[e] = begin;
    write_index(m_sizes.data, dtype, e, std::min(end, capacity) - std::min(begin, capacity));
    begin = end;
  }
  for (std::int64_t flat = 0; flat < positions.numel(); ++flat) {
    const std::int64_t expert = flat < counted ? expert_of(flat) : -1;
    const std::int64_t position = expert < 0 ? capacity : next[expert]++;
    const bool kept = position < capacity;
    if (kept) write_index(gather_indices.data, dtype, position, flat);
    write_index(positions.data, dtype, flat, kept ? position : -1);
  }
  for (std::int64_t r = begin; r < capacity; ++r) write_index(gather_indices.data, dtype, r, -1);
  if (begin > capacity && limits.overflow.given()) {
    write_index(limits.overflow.data, limits.overflow.dtype, 0, 1);
  }
}

std::optional<DroppedRow> CpuPasses::dropped_row(const TensorView& expert_ids, std::int64_t experts,
                                                 const TensorView& num_tokens,
                                                 std::int64_t capacity,
                                                 const ExecutionContext&) const {
  return find_dropped_row(expert_ids, experts, counted_tokens(expert_ids, num_tokens), capacity);
}

}  // namespace moegemm::cpu
