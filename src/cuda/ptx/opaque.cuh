#pragma once

#include <cstdint>

/// Values that the compiler cannot see through, where it would make too much of what it knows.
namespace moegemm::cuda::ptx {

/// The value itself. No pass before the assembler knows what it is, or that it is the same in every
/// round of a loop.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ std::int64_t opaque(std::int64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}

/// The value itself, in a register to stay: the assembler cannot compute it anew where it is used,
/// as it does in long loops when registers are short. All lanes of the warp must call.
__device__ __forceinline__ std::uint32_t keep(std::uint32_t value) {
  return __shfl_sync(0xffffffffu, value, threadIdx.x % 32);
}

}  // namespace moegemm::cuda::ptx
