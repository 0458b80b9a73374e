#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "cuda/backend/cuda_backend.h"

namespace moegemm::cuda::sm90 {

std::vector<KernelEntry> row_gemm_kernels();     ///< forward and dX
std::vector<KernelEntry> weight_gemm_kernels();  ///< dW
std::vector<KernelEntry> kernels();              ///< all of them

/// What no Hopper kernel takes of a problem's operands, as a clause; empty: nothing. `tf32`: of
/// those that multiply fp32 as TF32, else of those for 16 bits.
std::string refuse_operands(const Problem& problem, bool tf32 = false);

/// The element types of a kernel.
template <bool Tf32>
using FormatsOf = std::conditional_t<Tf32, Formats<DType::kFloat32>, TensorCoreFormats>;

/// KernelEntry::layer_functions. Layers in 16 bits run no TF32.
template <bool Tf32, typename Functions>
std::vector<const void*> layer_functions_of(const Functions& of) {
  if constexpr (Tf32) {
    return {};
  } else {
    return layer_functions(of, TensorCoreFormats());
  }
}

extern const Generation kGeneration;

}  // namespace moegemm::cuda::sm90
