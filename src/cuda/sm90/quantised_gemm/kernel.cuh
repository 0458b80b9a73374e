#pragma once

#include "cuda/sm90/quantised_gemm/mma.cuh"
#include "cuda/sm90/row_gemm/kernel.cuh"

/// Forward and dX on Hopper with weights as a checkpoint stores them. Everything but the
/// contraction is the kernel of ../row_gemm.
namespace moegemm::cuda::sm90 {

template <QuantisedGemm Kernel, DType D>
KernelFunctions quantised_gemm_functions() {
  static_assert(Kernel.quantised() && Kernel.blocks() == 1 && !Kernel.pingpong());
  return row_gemm_functions<Kernel, D>();
}

}  // namespace moegemm::cuda::sm90
