#pragma once

#include <cstdint>

/// What kernels of packed weights need beside shared_memory.cuh: other widths.
namespace moegemm::cuda::ptx {

/// 16 bytes of data that are read from end to end, past L1; L2 fetches 256 bytes. The pointer must
/// be 16-byte aligned.
__device__ __forceinline__ void cp_async_16_streaming(std::uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared), "l"(global)
               : "memory");
}

/// The first `bytes` of 4, at most, and zeros for the others: nothing after them is touched. Both
/// addresses are 4-byte aligned.
__device__ __forceinline__ void cp_async_4_partial(std::uint32_t shared, const void* global,
                                                   int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ std::uint32_t ld_shared_2(std::uint32_t shared) {
  std::uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(shared) : "memory");
  return value;
}
__device__ __forceinline__ uint2 ld_shared_8(std::uint32_t shared) {
  uint2 value;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(shared)
               : "memory");
  return value;
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
