#pragma once

#include <cstdint>

namespace moegemm::cuda::ptx {

/// The first `bytes` of 4, at most, and zeros for the others: nothing behind them is touched. Both
/// addresses are 4-byte aligned.
__device__ __forceinline__ void cp_async_4_partial(std::uint32_t shared, const void* global,
                                                   int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ uint4 ld_shared_16(std::uint32_t shared) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(shared)
               : "memory");
  return value;
}

}  // namespace moegemm::cuda::ptx
