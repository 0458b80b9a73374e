#pragma once

#include <cstdint>
#include <optional>

#include "core/backend.h"

/// The memory-bound companions of the products on the CPU. Arguments are validated by the callers.
namespace moegemm::cpu::passes {

/// Stable counting sort of the flat rows by expert.
void route(const TensorView& expert_ids, std::int64_t experts, const TensorView& m_sizes,
           const TensorView& gather_indices, const TensorView& inverse);

std::optional<RoutingFault> check(const RoutingView& routing, std::int64_t rows,
                                  std::int64_t flat_rows);

}  // namespace moegemm::cpu::passes
