#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "core/backend.h"

namespace moegemm::cuda {

/// Passes::check on a GPU: two small launches, then waits for the stream. Refused while the
/// stream is being captured. The current device is the tensors'.
std::optional<RoutingFault> check_routing(const RoutingView& routing, std::int64_t rows,
                                          cudaStream_t stream);

}  // namespace moegemm::cuda
