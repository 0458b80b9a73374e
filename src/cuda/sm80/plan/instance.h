#pragma once

#include "cuda/sm80/tile/traits.h"
#include "moegemm/kinds.h"

namespace moegemm::cuda::sm80 {

/// The address of a compiled kernel. Defined in row_gemm/kernel.cuh and weight_gemm/kernel.cuh,
/// instantiated once for each line of instances/sm80_kernels.inc and each of its types, in a
/// translation unit for each op and math.
template <Op O, Math M, Loads L, typename Shape, DType D>
const void* kernel_function();

}  // namespace moegemm::cuda::sm80
