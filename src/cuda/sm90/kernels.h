#pragma once

#include <string>
#include <vector>

#include "cuda/backend/cuda_backend.h"

namespace moegemm::cuda::sm90 {

std::vector<KernelEntry> row_gemm_kernels();     ///< forward and dX
std::vector<KernelEntry> weight_gemm_kernels();  ///< dW
std::vector<KernelEntry> kernels();              ///< all of them

/// What no Hopper kernel takes of a problem's operands, as a clause; empty: nothing.
std::string refuse_operands(const Problem& problem);

extern const Generation kGeneration;

}  // namespace moegemm::cuda::sm90
