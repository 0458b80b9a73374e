#pragma once

namespace moegemm::cuda::ptx {

/// The old value. Unlike atomicAdd it is not rewritten into a warp-aggregated form, which would
/// wait for the result at once instead of where it is used.
__device__ __forceinline__ unsigned atom_add(unsigned* address, unsigned value) {
  unsigned old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(__cvta_generic_to_global(address)), "r"(value)
               : "memory");
  return old;
}

}  // namespace moegemm::cuda::ptx
