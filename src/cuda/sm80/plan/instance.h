#pragma once

#include "cuda/sm80/tile/block_shape.h"
#include "moegemm/kinds.h"

namespace moegemm::cuda::sm80 {

/// The address of a compiled kernel. Defined in instance.cuh and
/// weight_gemm_instance.cuh, instantiated once for each line of instances/sm80_kernels.inc and each
/// of its types, in a translation unit for each op and math.
template <Op O, Math M, Loads L, typename Shape, DType D>
const void* kernel_function();

}  // namespace moegemm::cuda::sm80
