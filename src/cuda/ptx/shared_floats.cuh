#pragma once

#include <cstdint>

/// fp32 operands in shared memory, by 32-bit address.
namespace moegemm::cuda::ptx {

/// The address is a multiple of 16.
__device__ __forceinline__ float4 ld_shared_float4(std::uint32_t shared) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(shared)
               : "memory");
  return value;
}

/// One of them by itself: volatile, as the assembler would take it from a load of 16 bytes that has
/// it too, and with it the place among four registers.
__device__ __forceinline__ float ld_shared_float_alone(std::uint32_t shared) {
  float value;
  asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared) : "memory");
  return value;
}

}  // namespace moegemm::cuda::ptx
