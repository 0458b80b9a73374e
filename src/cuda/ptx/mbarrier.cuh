#pragma once

#include <cstdint>

/// mbarrier: the shared-memory barrier that threads, cp.async and the bulk copy engine arrive on.
/// Written here rather than taken from <cuda/ptx>, whose header alone adds seconds to each of the
/// kernel translation units.
namespace moegemm::cuda::ptx {

/// The 32-bit shared-window address that PTX instructions take.
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(std::uint64_t* barrier, std::uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(count));
}

/// Makes initialised barriers visible to the async proxy and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

/// One arrival that also announces bytes the copy engine will deliver.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(std::uint64_t* barrier,
                                                          std::uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

/// The barrier gets one arrival when all earlier cp.async of this thread have landed. `noinc`: the
/// arrival is one of those the barrier was initialised for.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

/// Waits until the phase with this parity has completed. A parity two phases ahead reads as
/// complete, so a waiter must never fall a whole ring behind or run ahead of it.
__device__ __forceinline__ void mbarrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "retry:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@done bra finished;\n"
      "bra retry;\n"
      "finished:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

/// Whether the phase with this parity has completed, without waiting; if so, as after
/// mbarrier_wait, what came before it is visible.
__device__ __forceinline__ bool mbarrier_poll(std::uint64_t* barrier, std::uint32_t parity) {
  int done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace moegemm::cuda::ptx
