#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "core/backend.h"

namespace moegemm::cuda {

/// Passes::check on a GPU: two small launches, then waits for the stream. Refused while the
/// stream is being captured. The current device is the tensors'.
std::optional<RoutingFault> check_routing(const RoutingView& routing, std::int64_t rows,
                                          std::int64_t flat_rows, cudaStream_t stream);

/// Passes::dropped_row on a GPU: brings the ids to the host. Refused while the stream is being
/// captured.
std::optional<DroppedRow> find_dropped_row_on_device(const TensorView& expert_ids,
                                                     std::int64_t experts,
                                                     const TensorView& num_tokens,
                                                     std::int64_t capacity, cudaStream_t stream);

}  // namespace moegemm::cuda
