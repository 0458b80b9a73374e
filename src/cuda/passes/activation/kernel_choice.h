#pragma once

#include <vector>

#include "core/types/constant_of.h"
#include "cuda/device/element.cuh"
#include "moegemm/passes.h"

namespace moegemm::cuda {

/// choose.operator()<T, L>() for a dtype and a layout that are known at run time.
template <typename Choose>
const void* for_dtype_and_layout(DType dtype, GateLayout layout, const Choose& choose) {
  return with_format(FloatingFormats(), dtype, [&]<DType D>() {
    const void* kernel = nullptr;
    with_constant<kGateLayouts>(
        layout, [&]<GateLayout L>() { kernel = choose.template operator()<ElementType<D>, L>(); });
    return kernel;
  });
}

/// The same for both 16-bit dtypes and every layout.
template <typename Choose>
std::vector<const void*> for_16_bit_layouts(const Choose& choose) {
  std::vector<const void*> kernels;
  for_each_format(TensorCoreFormats(), [&]<DType D>() {
    for (const auto& layout : kGateLayouts) {
      kernels.push_back(for_dtype_and_layout(D, layout.value, choose));
    }
  });
  return kernels;
}

}  // namespace moegemm::cuda
