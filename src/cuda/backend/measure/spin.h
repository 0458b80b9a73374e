#pragma once

#include <cuda_runtime_api.h>

namespace moegemm::cuda {

/// Occupies one thread of the stream's device, which must be current, for so long; touches no
/// memory.
void spin(int microseconds, cudaStream_t stream);

}  // namespace moegemm::cuda
