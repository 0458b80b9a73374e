#pragma once

#include <cstdint>
#include <optional>

#include "core/backend.h"

/// Routing with a capacity on the CPU. Arguments are validated by the callers.
namespace moegemm::cpu::passes {

void route_compact(const TensorView& expert_ids, std::int64_t experts, const TensorView& m_sizes,
                   const TensorView& gather_indices, const TensorView& positions,
                   const RouteLimits& limits);

std::optional<DroppedRow> dropped_row(const TensorView& expert_ids, std::int64_t experts,
                                      const TensorView& num_tokens, std::int64_t capacity);

}  // namespace moegemm::cpu::passes
