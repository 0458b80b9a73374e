#pragma once

#include <cstdint>

/// What a warpgroup does besides multiplying: registers, named barriers, wgmma ordering.
namespace moegemm::cuda::ptx {

/// Takes effect only in a kernel with a register cap at entry (`__launch_bounds__(threads, 1)`);
/// all warpgroups' counts together must fit the CTA's allocation or `inc` waits for ever.
template <int Registers>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

/// `id` 0 is __syncthreads'; `threads` counts those that sync and those that arrive.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/// Keeps the compiler from reading an accumulator before the wait that precedes this call.
__device__ __forceinline__ void accumulator_barrier(float& value) {
  asm volatile("" : "+f"(value)::"memory");
}

/// The same pointer, of which the compiler knows nothing: it keeps the sum that made it in
/// registers instead of adding it up again at each use.
template <typename T>
__device__ __forceinline__ T* opaque(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

/// The same bits, of which the compiler knows nothing: it keeps them, not what they were made of.
__device__ __forceinline__ std::uint32_t opaque(std::uint32_t bits) {
  asm volatile("" : "+r"(bits));
  return bits;
}

/// threadIdx.x, read where it is called: nothing that follows from it waits in registers before.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

/// A warp-uniform value that the compiler knows to be uniform.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

}  // namespace moegemm::cuda::ptx
