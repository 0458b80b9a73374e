#pragma once

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"

namespace moegemm::cuda::ptx {

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
