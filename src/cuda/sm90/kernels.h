#pragma once

#include <string>
#include <vector>

#include "cuda/backend/cuda_backend.h"

namespace moegemm::cuda::sm90 {

std::vector<KernelEntry> row_gemm_kernels();     ///< forward and dX
std::vector<KernelEntry> weight_gemm_kernels();  ///< dW
std::vector<KernelEntry> tf32dw_gemm_kernels();  ///< dW of fp32 as TF32
std::vector<KernelEntry> kernels();              ///< all of them

/// What no Hopper kernel takes of a problem's operands, as a clause; empty: nothing. `tf32`: of
/// those that multiply fp32 as TF32, else of those for 16 bits.
std::string refuse_operands(const Problem& problem, bool tf32 = false);

extern const Generation kGeneration;

}  // namespace moegemm::cuda::sm90
