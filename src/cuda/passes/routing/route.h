#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moegemm/compact.h"
#include "moegemm/tensor.h"

namespace moegemm::cuda {

/// moegemm::route on a GPU, in at most two launches; see include/moegemm/routing.h for the meaning
/// and route_plan.h for `workspace`. The current device is the tensors'.
void launch_route(const TensorView& expert_ids, std::int64_t experts, const TensorView& m_sizes,
                  const TensorView& gather_indices, const TensorView& inverse, void* workspace,
                  cudaStream_t stream);

/// moegemm::route_compact likewise; see include/moegemm/compact.h.
void launch_route_compact(const TensorView& expert_ids, std::int64_t experts,
                          const TensorView& m_sizes, const TensorView& gather_indices,
                          const TensorView& positions, const RouteLimits& limits, void* workspace,
                          cudaStream_t stream);

}  // namespace moegemm::cuda
