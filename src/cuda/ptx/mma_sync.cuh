#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

/// The warp-level tensor-core instructions of sm_80 and later: ldmatrix and mma.sync. In all of
/// them lane l is (g, t) = (l / 4, l % 4).
namespace moegemm::cuda::ptx {

// The operands of every instruction here.
#define MOEGEMM_LDMATRIX_X4(kind)                                                         \
  asm volatile("ldmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 {%0, %1, %2, %3}, [%4];" \
               : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)                                   \
               : "r"(shared)                                                              \
               : "memory")
#define MOEGEMM_MMA_SYNC(kind)                                                                    \
  asm("mma.sync.aligned." kind " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                            \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

/// Four 8x8 matrices of 16-bit elements, rows of 16 bytes; lane l gives the address of row l % 8 of
/// matrix l / 8 and gets elements (g, 2t) and (g, 2t + 1) of each.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t shared, std::uint32_t& m0,
                                            std::uint32_t& m1, std::uint32_t& m2,
                                            std::uint32_t& m3) {
  MOEGEMM_LDMATRIX_X4("");
}

/// The same with each matrix transposed: elements (2t, g) and (2t + 1, g).
__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t shared, std::uint32_t& m0,
                                                  std::uint32_t& m1, std::uint32_t& m2,
                                                  std::uint32_t& m3) {
  MOEGEMM_LDMATRIX_X4(".trans");
}

/// d += a b with a [16, 16], b [16, 8], d [16, 8]. d holds (g, 2t), (g, 2t + 1) and the same of row
/// g + 8. The type of the last argument is that of a and b.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4],
                                             const std::uint32_t (&b)[2], __nv_bfloat16) {
  MOEGEMM_MMA_SYNC("m16n8k16.row.col.f32.bf16.bf16.f32");
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4],
                                             const std::uint32_t (&b)[2], __half) {
  MOEGEMM_MMA_SYNC("m16n8k16.row.col.f32.f16.f16.f32");
}

/// The same with a [16, 8] and b [8, 8] of TF32. Elements of a: (g, t), (g + 8, t), (g, t + 4),
/// (g + 8, t + 4); of b: (t, g), (t + 4, g).
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const std::uint32_t (&a)[4],
                                                 const std::uint32_t (&b)[2]) {
  MOEGEMM_MMA_SYNC("m16n8k8.row.col.f32.tf32.tf32.f32");
}
#undef MOEGEMM_LDMATRIX_X4
#undef MOEGEMM_MMA_SYNC

/// fp32 bits rounded to the nearest TF32: without it the tensor core cuts them off.
__device__ __forceinline__ std::uint32_t cvt_rna_tf32(std::uint32_t fp32_bits) {
  std::uint32_t tf32;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(tf32) : "f"(__uint_as_float(fp32_bits)));
  return tf32;
}

}  // namespace moegemm::cuda::ptx
