#pragma once

#include <cstdint>

namespace moegemm::cuda::ptx {

/// 16 bytes of data that are read from end to end, past L1; L2 fetches 256 bytes. The pointer must
/// be 16-byte aligned.
__device__ __forceinline__ void cp_async_16_streaming(std::uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared), "l"(global)
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
__device__ __forceinline__ void st_shared_8(std::uint32_t shared, const uint2& value) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared), "r"(value.x), "r"(value.y)
               : "memory");
}

}  // namespace moegemm::cuda::ptx
