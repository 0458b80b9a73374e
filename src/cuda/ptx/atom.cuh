#pragma once

namespace moegemm::cuda::ptx {

/// Adds 1; the old value. Not atom.add and not atomicAdd: ptxas rewrites both into a form for whole
/// warps, which waits for the result at once instead of where it is used.
__device__ __forceinline__ unsigned atom_increment(unsigned* address) {
  unsigned old;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
               : "=r"(old)
               : "l"(__cvta_generic_to_global(address))
               : "memory");
  return old;
}

}  // namespace moegemm::cuda::ptx
