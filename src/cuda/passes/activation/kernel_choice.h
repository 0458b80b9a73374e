#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <vector>

#include "moegemm/activation.h"

namespace moegemm::cuda {

/// choose.operator()<T, L>() for a dtype and a layout that are known at run time.
template <typename Choose>
const void* for_dtype_and_layout(DType dtype, GateLayout layout, const Choose& choose) {
  const auto with_layout = [&]<typename T>() -> const void* {
    switch (layout) {
      case GateLayout::kNone:
        return choose.template operator()<T, GateLayout::kNone>();
      case GateLayout::kConcatenated:
        return choose.template operator()<T, GateLayout::kConcatenated>();
      case GateLayout::kInterleaved:
        break;
    }
    return choose.template operator()<T, GateLayout::kInterleaved>();
  };
  switch (dtype) {
    case DType::kFloat16:
      return with_layout.template operator()<__half>();
    case DType::kBFloat16:
      return with_layout.template operator()<__nv_bfloat16>();
    default:
      return with_layout.template operator()<float>();
  }
}

/// The same for both 16-bit dtypes and every layout.
template <typename Choose>
std::vector<const void*> for_16_bit_layouts(const Choose& choose) {
  std::vector<const void*> kernels;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const GateLayout layout :
         {GateLayout::kConcatenated, GateLayout::kInterleaved, GateLayout::kNone}) {
      kernels.push_back(for_dtype_and_layout(dtype, layout, choose));
    }
  }
  return kernels;
}

}  // namespace moegemm::cuda
