#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/validation/tensor_rules.h"

/// What `route` and `route_compact` ask of their arguments alike.
namespace moegemm {

void require_experts(std::int64_t num_experts);

/// Ids [T, topk] of `num_experts` experts, and sizes [E] in a type that can count their rows.
void require_routes(const Argument& expert_ids, std::int64_t num_experts, const Argument& m_sizes);

/// The passes of the ids' device, which `workspace` is enough for.
const Passes& require_workspace(const void* workspace, const TensorView& expert_ids,
                                std::int64_t num_experts);

}  // namespace moegemm
