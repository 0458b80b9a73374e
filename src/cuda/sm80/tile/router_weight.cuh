#pragma once

namespace moegemm::cuda::sm80 {

/// router_weights[flat], in fp32 or in the type of the inputs.
template <typename Element>
__device__ __forceinline__ float router_weight(const void* weights, bool are_fp32, int flat) {
  if (are_fp32) return __ldg(static_cast<const float*>(weights) + flat);
  return static_cast<float>(__ldg(static_cast<const Element*>(weights) + flat));
}

}  // namespace moegemm::cuda::sm80
