#pragma once

#include "cuda/ptx/wgmma_registers.cuh"

/// wgmma.mma_async m64nNk8 of TF32, as the wrappers of 16-bit elements with T = float. Operands in
/// shared memory are K-major only. A step of 8 is 32 bytes, as one of 16 is of 16 bits. The tensor
/// cores leave out the 13 low bits of an operand: whoever writes it to shared memory rounds it.
namespace moegemm::cuda::ptx {

#define MOEGEMM_WGMMA_TF32_ASM(N, G, p_, a_, b_)                                        \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_ ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
  "k8.f32.tf32.tf32 {" MOEGEMM_D##G "}, " a_ ", %" #b_ ", p, 1, 1;\n}\n"

// One specialisation: N, N / 8, and the numbers of the operands that follow the accumulators, first
// with A in shared memory, then with A in registers.
#define MOEGEMM_WGMMA_TF32(N, G, a0_, a1_, a2_, a3_, b_, p_)                                   \
  template <>                                                                                  \
  struct Wgmma<float, N, Major::kK, Major::kK> {                                               \
    static __device__ __forceinline__ void run(float* d, std::uint64_t a, std::uint64_t b,     \
                                               bool accumulate) {                              \
      asm volatile(MOEGEMM_WGMMA_TF32_ASM(N, G, a2_, "%" #a0_, a1_)                            \
                   : MOEGEMM_C##G("+f")                                                        \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                       \
    }                                                                                          \
    static __device__ __forceinline__ void start(float* d, std::uint64_t a, std::uint64_t b) { \
      asm volatile(MOEGEMM_WGMMA_TF32_ASM(N, G, a2_, "%" #a0_, a1_)                            \
                   : MOEGEMM_C##G("=f")                                                        \
                   : "l"(a), "l"(b), "n"(0));                                                  \
    }                                                                                          \
  };                                                                                           \
  template <>                                                                                  \
  struct WgmmaRegisters<float, N> {                                                            \
    static __device__ __forceinline__ void run(float* d, const std::uint32_t (&a)[4],          \
                                               std::uint64_t b, bool accumulate) {             \
      asm volatile(                                                                            \
          MOEGEMM_WGMMA_TF32_ASM(N, G, p_, "{%" #a0_ ", %" #a1_ ", %" #a2_ ", %" #a3_ "}", b_) \
          : MOEGEMM_C##G("+f")                                                                 \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                                \
            "r"(static_cast<int>(accumulate)));                                                \
    }                                                                                          \
  };

MOEGEMM_WGMMA_TF32(8, 1, 4, 5, 6, 7, 8, 9)
MOEGEMM_WGMMA_TF32(16, 2, 8, 9, 10, 11, 12, 13)
MOEGEMM_WGMMA_TF32(32, 4, 16, 17, 18, 19, 20, 21)
MOEGEMM_WGMMA_TF32(48, 6, 24, 25, 26, 27, 28, 29)
MOEGEMM_WGMMA_TF32(64, 8, 32, 33, 34, 35, 36, 37)
MOEGEMM_WGMMA_TF32(80, 10, 40, 41, 42, 43, 44, 45)
MOEGEMM_WGMMA_TF32(96, 12, 48, 49, 50, 51, 52, 53)
MOEGEMM_WGMMA_TF32(112, 14, 56, 57, 58, 59, 60, 61)
MOEGEMM_WGMMA_TF32(128, 16, 64, 65, 66, 67, 68, 69)
MOEGEMM_WGMMA_TF32(144, 18, 72, 73, 74, 75, 76, 77)
MOEGEMM_WGMMA_TF32(160, 20, 80, 81, 82, 83, 84, 85)

/// fp32 rounded to the nearest TF32, ties to even, as the copy engine does it
/// (CU_TENSOR_MAP_DATA_TYPE_TFLOAT32: measured to be the same for all bits, NaN and infinities
/// too).
__device__ __forceinline__ std::uint32_t round_to_tf32(std::uint32_t bits) {
  std::uint32_t tf32;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(tf32) : "f"(__uint_as_float(bits)));
  return tf32;
}

}  // namespace moegemm::cuda::ptx
