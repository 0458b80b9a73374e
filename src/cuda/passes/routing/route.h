#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moegemm/tensor.h"

namespace moegemm::cuda {

/// moegemm::route on a GPU, in at most two launches; see include/moegemm/passes.h for the meaning
/// and route_plan.h for `workspace`. The current device is the tensors'.
void launch_route(const TensorView& expert_ids, std::int64_t experts, const TensorView& m_sizes,
                  const TensorView& gather_indices, const TensorView& inverse, void* workspace,
                  cudaStream_t stream);

}  // namespace moegemm::cuda
