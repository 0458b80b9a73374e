#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

/// wgmma.mma_async m64nNk16 with both operands in shared memory and fp32 accumulators.
///
/// Descriptor of a 128-byte-swizzled operand: bits 0-13 address / 16, 16-29 leading stride / 16,
/// 32-45 stride of 8-row groups / 16 (always 1024 bytes here), 62-63 = 1. Tiles are 1024-byte
/// aligned.
namespace moegemm::cuda::ptx {

/// How an operand lies in shared memory: contraction index fastest (K-major) or the M/N index
/// fastest (MN-major).
enum class Major { kK, kMn };

/// `slab_bytes` is the distance between 64-wide slabs of an MN-major operand; it is ignored for
/// K-major operands and for those one slab wide.
__device__ __forceinline__ std::uint64_t smem_descriptor(std::uint32_t shared_address,
                                                         std::uint32_t slab_bytes = 16) {
  return (std::uint64_t{1} << 62) | (std::uint64_t{1024 >> 4} << 32) |
         (std::uint64_t{slab_bytes >> 4} << 16) | ((shared_address & 0x3ffff) >> 4);
}

/// What to add to a descriptor for the next 16 of the contraction: 32 bytes along a K-major row,
/// 16 rows of 128 bytes in an MN-major slab.
template <Major M>
constexpr std::uint32_t kDescriptorStepK16 = M == Major::kK ? 32 >> 4 : 16 * 128 >> 4;

/// D[64, N] += A[64, 16] B[16, N]; with `accumulate` false D is overwritten. d has N / 2 elements:
/// d[4 j + 2 h + i] is row 16 * warp + lane / 4 + 8 h, column 8 j + 2 * (lane % 4) + i.
template <typename T, int N, Major A, Major B>
__device__ __forceinline__ void wgmma(float* d, std::uint64_t a, std::uint64_t b, bool accumulate);

// Operand lists, four accumulators (eight columns) at a time.
// clang-format off
#define MOEGEMM_D1 "%0, %1, %2, %3"
#define MOEGEMM_D2 MOEGEMM_D1 ", " "%4, %5, %6, %7"
#define MOEGEMM_D3 MOEGEMM_D2 ", " "%8, %9, %10, %11"
#define MOEGEMM_D4 MOEGEMM_D3 ", " "%12, %13, %14, %15"
#define MOEGEMM_D5 MOEGEMM_D4 ", " "%16, %17, %18, %19"
#define MOEGEMM_D6 MOEGEMM_D5 ", " "%20, %21, %22, %23"
#define MOEGEMM_D7 MOEGEMM_D6 ", " "%24, %25, %26, %27"
#define MOEGEMM_D8 MOEGEMM_D7 ", " "%28, %29, %30, %31"
#define MOEGEMM_D9 MOEGEMM_D8 ", " "%32, %33, %34, %35"
#define MOEGEMM_D10 MOEGEMM_D9 ", " "%36, %37, %38, %39"
#define MOEGEMM_D11 MOEGEMM_D10 ", " "%40, %41, %42, %43"
#define MOEGEMM_D12 MOEGEMM_D11 ", " "%44, %45, %46, %47"
#define MOEGEMM_D13 MOEGEMM_D12 ", " "%48, %49, %50, %51"
#define MOEGEMM_D14 MOEGEMM_D13 ", " "%52, %53, %54, %55"
#define MOEGEMM_D15 MOEGEMM_D14 ", " "%56, %57, %58, %59"
#define MOEGEMM_D16 MOEGEMM_D15 ", " "%60, %61, %62, %63"
#define MOEGEMM_D17 MOEGEMM_D16 ", " "%64, %65, %66, %67"
#define MOEGEMM_D18 MOEGEMM_D17 ", " "%68, %69, %70, %71"
#define MOEGEMM_D19 MOEGEMM_D18 ", " "%72, %73, %74, %75"
#define MOEGEMM_D20 MOEGEMM_D19 ", " "%76, %77, %78, %79"
#define MOEGEMM_D21 MOEGEMM_D20 ", " "%80, %81, %82, %83"
#define MOEGEMM_D22 MOEGEMM_D21 ", " "%84, %85, %86, %87"
#define MOEGEMM_D23 MOEGEMM_D22 ", " "%88, %89, %90, %91"
#define MOEGEMM_D24 MOEGEMM_D23 ", " "%92, %93, %94, %95"
#define MOEGEMM_D25 MOEGEMM_D24 ", " "%96, %97, %98, %99"
#define MOEGEMM_D26 MOEGEMM_D25 ", " "%100, %101, %102, %103"
#define MOEGEMM_D27 MOEGEMM_D26 ", " "%104, %105, %106, %107"
#define MOEGEMM_D28 MOEGEMM_D27 ", " "%108, %109, %110, %111"
#define MOEGEMM_D29 MOEGEMM_D28 ", " "%112, %113, %114, %115"
#define MOEGEMM_D30 MOEGEMM_D29 ", " "%116, %117, %118, %119"
#define MOEGEMM_D31 MOEGEMM_D30 ", " "%120, %121, %122, %123"
#define MOEGEMM_D32 MOEGEMM_D31 ", " "%124, %125, %126, %127"
#define MOEGEMM_F4(m, i) m(d[i]), m(d[i + 1]), m(d[i + 2]), m(d[i + 3])
#define MOEGEMM_C1(m) MOEGEMM_F4(m, 0)
#define MOEGEMM_C2(m) MOEGEMM_C1(m), MOEGEMM_F4(m, 4)
#define MOEGEMM_C3(m) MOEGEMM_C2(m), MOEGEMM_F4(m, 8)
#define MOEGEMM_C4(m) MOEGEMM_C3(m), MOEGEMM_F4(m, 12)
#define MOEGEMM_C5(m) MOEGEMM_C4(m), MOEGEMM_F4(m, 16)
#define MOEGEMM_C6(m) MOEGEMM_C5(m), MOEGEMM_F4(m, 20)
#define MOEGEMM_C7(m) MOEGEMM_C6(m), MOEGEMM_F4(m, 24)
#define MOEGEMM_C8(m) MOEGEMM_C7(m), MOEGEMM_F4(m, 28)
#define MOEGEMM_C9(m) MOEGEMM_C8(m), MOEGEMM_F4(m, 32)
#define MOEGEMM_C10(m) MOEGEMM_C9(m), MOEGEMM_F4(m, 36)
#define MOEGEMM_C11(m) MOEGEMM_C10(m), MOEGEMM_F4(m, 40)
#define MOEGEMM_C12(m) MOEGEMM_C11(m), MOEGEMM_F4(m, 44)
#define MOEGEMM_C13(m) MOEGEMM_C12(m), MOEGEMM_F4(m, 48)
#define MOEGEMM_C14(m) MOEGEMM_C13(m), MOEGEMM_F4(m, 52)
#define MOEGEMM_C15(m) MOEGEMM_C14(m), MOEGEMM_F4(m, 56)
#define MOEGEMM_C16(m) MOEGEMM_C15(m), MOEGEMM_F4(m, 60)
#define MOEGEMM_C17(m) MOEGEMM_C16(m), MOEGEMM_F4(m, 64)
#define MOEGEMM_C18(m) MOEGEMM_C17(m), MOEGEMM_F4(m, 68)
#define MOEGEMM_C19(m) MOEGEMM_C18(m), MOEGEMM_F4(m, 72)
#define MOEGEMM_C20(m) MOEGEMM_C19(m), MOEGEMM_F4(m, 76)
#define MOEGEMM_C21(m) MOEGEMM_C20(m), MOEGEMM_F4(m, 80)
#define MOEGEMM_C22(m) MOEGEMM_C21(m), MOEGEMM_F4(m, 84)
#define MOEGEMM_C23(m) MOEGEMM_C22(m), MOEGEMM_F4(m, 88)
#define MOEGEMM_C24(m) MOEGEMM_C23(m), MOEGEMM_F4(m, 92)
#define MOEGEMM_C25(m) MOEGEMM_C24(m), MOEGEMM_F4(m, 96)
#define MOEGEMM_C26(m) MOEGEMM_C25(m), MOEGEMM_F4(m, 100)
#define MOEGEMM_C27(m) MOEGEMM_C26(m), MOEGEMM_F4(m, 104)
#define MOEGEMM_C28(m) MOEGEMM_C27(m), MOEGEMM_F4(m, 108)
#define MOEGEMM_C29(m) MOEGEMM_C28(m), MOEGEMM_F4(m, 112)
#define MOEGEMM_C30(m) MOEGEMM_C29(m), MOEGEMM_F4(m, 116)
#define MOEGEMM_C31(m) MOEGEMM_C30(m), MOEGEMM_F4(m, 120)
#define MOEGEMM_C32(m) MOEGEMM_C31(m), MOEGEMM_F4(m, 124)
// clang-format on

// One specialisation: N, N / 8, and the numbers of the operands that follow the accumulators.
#define MOEGEMM_WGMMA_ASM(TYPE, N, G, a_, b_, ta_, tb_)                             \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" MOEGEMM_D##G \
      "}, %" #a_ ", %" #b_ ", p, 1, 1, %" #ta_ ", %" #tb_ ";\n}\n"
#define MOEGEMM_WGMMA_TYPED(T, TYPE, N, G, a_, b_, p_, ta_, tb_)                               \
  template <Major A, Major B>                                                                  \
  struct Wgmma<T, N, A, B> {                                                                   \
    static __device__ __forceinline__ void run(float* d, std::uint64_t a, std::uint64_t b,     \
                                               bool accumulate) {                              \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_                                    \
                   ", 0;\n" MOEGEMM_WGMMA_ASM(TYPE, N, G, a_, b_, ta_, tb_)                    \
                   : MOEGEMM_C##G("+f")                                                        \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(A == Major::kMn),  \
                     "n"(B == Major::kMn));                                                    \
    }                                                                                          \
    static __device__ __forceinline__ void start(float* d, std::uint64_t a, std::uint64_t b) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_                                    \
                   ", 0;\n" MOEGEMM_WGMMA_ASM(TYPE, N, G, a_, b_, ta_, tb_)                    \
                   : MOEGEMM_C##G("=f")                                                        \
                   : "l"(a), "l"(b), "n"(0), "n"(A == Major::kMn), "n"(B == Major::kMn));      \
    }                                                                                          \
  };
// One for each type that wgmma multiplies in steps of 16.
#define MOEGEMM_FOR_WGMMA_TYPES(SPECIALISE, ...) \
  SPECIALISE(__nv_bfloat16, "bf16", __VA_ARGS__) \
  SPECIALISE(__half, "f16", __VA_ARGS__)
#define MOEGEMM_WGMMA(...) MOEGEMM_FOR_WGMMA_TYPES(MOEGEMM_WGMMA_TYPED, __VA_ARGS__)

template <typename T, int N, Major A, Major B>
struct Wgmma;

MOEGEMM_WGMMA(8, 1, 4, 5, 6, 7, 8)
MOEGEMM_WGMMA(16, 2, 8, 9, 10, 11, 12)
MOEGEMM_WGMMA(24, 3, 12, 13, 14, 15, 16)
MOEGEMM_WGMMA(32, 4, 16, 17, 18, 19, 20)
MOEGEMM_WGMMA(40, 5, 20, 21, 22, 23, 24)
MOEGEMM_WGMMA(48, 6, 24, 25, 26, 27, 28)
MOEGEMM_WGMMA(56, 7, 28, 29, 30, 31, 32)
MOEGEMM_WGMMA(64, 8, 32, 33, 34, 35, 36)
MOEGEMM_WGMMA(80, 10, 40, 41, 42, 43, 44)
MOEGEMM_WGMMA(96, 12, 48, 49, 50, 51, 52)
MOEGEMM_WGMMA(112, 14, 56, 57, 58, 59, 60)
MOEGEMM_WGMMA(128, 16, 64, 65, 66, 67, 68)
MOEGEMM_WGMMA(144, 18, 72, 73, 74, 75, 76)
MOEGEMM_WGMMA(160, 20, 80, 81, 82, 83, 84)
MOEGEMM_WGMMA(176, 22, 88, 89, 90, 91, 92)
MOEGEMM_WGMMA(192, 24, 96, 97, 98, 99, 100)
MOEGEMM_WGMMA(208, 26, 104, 105, 106, 107, 108)
MOEGEMM_WGMMA(224, 28, 112, 113, 114, 115, 116)
MOEGEMM_WGMMA(240, 30, 120, 121, 122, 123, 124)
MOEGEMM_WGMMA(256, 32, 128, 129, 130, 131, 132)

template <typename T, int N, Major A, Major B>
__device__ __forceinline__ void wgmma(float* d, std::uint64_t a, std::uint64_t b, bool accumulate) {
  Wgmma<T, N, A, B>::run(d, a, b, accumulate);
}

/// D[64, N] = A[64, 16] B[16, N]. Unlike wgmma(..., false) it does not read D as far as the
/// compiler knows, so the registers of a finished tile are free until here.
template <typename T, int N, Major A, Major B>
__device__ __forceinline__ void wgmma_start(float* d, std::uint64_t a, std::uint64_t b) {
  Wgmma<T, N, A, B>::start(d, a, b);
}

}  // namespace moegemm::cuda::ptx
