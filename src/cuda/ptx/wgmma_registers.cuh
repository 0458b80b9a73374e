#pragma once

#include "cuda/ptx/wgmma.cuh"

/// wgmma.mma_async m64nNk16 with A in registers and B, K-major, in shared memory.
namespace moegemm::cuda::ptx {

// One specialisation: N, N / 8, and the numbers of the operands that follow the accumulators.
#define MOEGEMM_WGMMA_REGISTERS_TYPED(T, TYPE, N, G, a0_, a1_, a2_, a3_, b_, p_)              \
  template <>                                                                                 \
  struct WgmmaRegisters<T, N> {                                                               \
    static __device__ __forceinline__ void run(float* d, const std::uint32_t (&a)[4],         \
                                               std::uint64_t b, bool accumulate) {            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_                                   \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE      \
                   " {" MOEGEMM_D##G "}, {%" #a0_ ", %" #a1_ ", %" #a2_ ", %" #a3_ "}, %" #b_ \
                                     ", p, 1, 1, 0;\n}\n"                                     \
                   : MOEGEMM_C##G("+f")                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                      \
                     "r"(static_cast<int>(accumulate)));                                      \
    }                                                                                         \
  };
#define MOEGEMM_WGMMA_REGISTERS(...) \
  MOEGEMM_FOR_WGMMA_TYPES(MOEGEMM_WGMMA_REGISTERS_TYPED, __VA_ARGS__)

template <typename T, int N>
struct WgmmaRegisters;

MOEGEMM_WGMMA_REGISTERS(8, 1, 4, 5, 6, 7, 8, 9)
MOEGEMM_WGMMA_REGISTERS(16, 2, 8, 9, 10, 11, 12, 13)
MOEGEMM_WGMMA_REGISTERS(24, 3, 12, 13, 14, 15, 16, 17)
MOEGEMM_WGMMA_REGISTERS(32, 4, 16, 17, 18, 19, 20, 21)
MOEGEMM_WGMMA_REGISTERS(40, 5, 20, 21, 22, 23, 24, 25)
MOEGEMM_WGMMA_REGISTERS(48, 6, 24, 25, 26, 27, 28, 29)
MOEGEMM_WGMMA_REGISTERS(56, 7, 28, 29, 30, 31, 32, 33)
MOEGEMM_WGMMA_REGISTERS(64, 8, 32, 33, 34, 35, 36, 37)
MOEGEMM_WGMMA_REGISTERS(80, 10, 40, 41, 42, 43, 44, 45)
MOEGEMM_WGMMA_REGISTERS(96, 12, 48, 49, 50, 51, 52, 53)
MOEGEMM_WGMMA_REGISTERS(112, 14, 56, 57, 58, 59, 60, 61)
MOEGEMM_WGMMA_REGISTERS(128, 16, 64, 65, 66, 67, 68, 69)
MOEGEMM_WGMMA_REGISTERS(144, 18, 72, 73, 74, 75, 76, 77)
MOEGEMM_WGMMA_REGISTERS(160, 20, 80, 81, 82, 83, 84, 85)
MOEGEMM_WGMMA_REGISTERS(176, 22, 88, 89, 90, 91, 92, 93)
MOEGEMM_WGMMA_REGISTERS(192, 24, 96, 97, 98, 99, 100, 101)
MOEGEMM_WGMMA_REGISTERS(208, 26, 104, 105, 106, 107, 108, 109)
MOEGEMM_WGMMA_REGISTERS(224, 28, 112, 113, 114, 115, 116, 117)
MOEGEMM_WGMMA_REGISTERS(240, 30, 120, 121, 122, 123, 124, 125)
MOEGEMM_WGMMA_REGISTERS(256, 32, 128, 129, 130, 131, 132, 133)

/// D[64, N] += A[64, 16] B[16, N]; with `accumulate` false D is overwritten. d as in wgmma. Lane
/// 4 g + t of warp w has a[h + 2 u] = A[16 w + g + 8 h][2 t + 8 u], and the element after it in the
/// high half.
template <typename T, int N>
__device__ __forceinline__ void wgmma(float* d, const std::uint32_t (&a)[4], std::uint64_t b,
                                      bool accumulate) {
  WgmmaRegisters<T, N>::run(d, a, b, accumulate);
}

/// The descriptor of a K-major operand of 16 columns: rows of 32 bytes in the 32-byte swizzle.
__device__ __forceinline__ std::uint64_t smem_descriptor_32b(std::uint32_t shared_address) {
  return (std::uint64_t{3} << 62) | (std::uint64_t{256 >> 4} << 32) | (std::uint64_t{1} << 16) |
         ((shared_address & 0x3ffff) >> 4);
}

}  // namespace moegemm::cuda::ptx
