#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace moegemm::cuda {

/// "cudaErrorInvalidValue: invalid argument".
std::string describe(cudaError_t status);

/// Throws Error(kRuntime) unless `status` is success. `what` says what was tried, as a clause:
/// "query the current device" gives "could not query the current device: cudaError...". The error
/// is also taken out of the runtime's last-error slot, so that a caller who looks there later does
/// not see it again.
void check(cudaError_t status, const char* what);

}  // namespace moegemm::cuda
