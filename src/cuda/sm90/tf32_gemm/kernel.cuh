#pragma once

#include "cuda/sm90/row_gemm/kernel.cuh"
#include "cuda/sm90/tf32_gemm/load.cuh"
#include "cuda/sm90/tf32_gemm/mma.cuh"
#include "cuda/sm90/tf32_gemm/store.cuh"

/// Forward and dX of fp32 on Hopper where the caller allows TF32. Operands are rounded to the
/// nearest TF32 on their way into shared memory. Everything but the contraction of dX, gathered
/// rows and the stores is the kernel of ../row_gemm.
namespace moegemm::cuda::sm90 {

template <Tf32Gemm Kernel, DType D>
KernelFunctions tf32_gemm_functions() {
  static_assert(Kernel.tf32 && Kernel.blocks() == 2 && !Kernel.activated);
  return row_gemm_functions<Kernel, D>();
}

}  // namespace moegemm::cuda::sm90
