#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "moegemm/kinds.h"

namespace moegemm::cuda {

template <DType D>
using ElementType =
    std::conditional_t<D == DType::kFloat32, float,
                       std::conditional_t<D == DType::kFloat16, __half, __nv_bfloat16>>;

}  // namespace moegemm::cuda
