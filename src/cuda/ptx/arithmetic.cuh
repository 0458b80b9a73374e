#pragma once

#include <cstdint>

/// Arithmetic in one instruction each, where CUDA C++ has no function that surely is that one.
/// Pairs are two 16-bit numbers in a register, the first in the low half; each result is rounded
/// once.
namespace moegemm::cuda::ptx {

/// 2^x; subnormal numbers are zeros.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// NaN stays, where fminf and fmaxf would give the other operand.
__device__ __forceinline__ float min_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

/// Byte i of the result is the byte of {a, b} that nibble i of the selector names; with 8 added,
/// eight copies of that byte's highest bit, which __byte_perm does not promise.
__device__ __forceinline__ std::uint32_t prmt(std::uint32_t a, std::uint32_t b,
                                              std::uint32_t selector) {
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

/// (a & b) | c in one instruction, whatever is constant.
__device__ __forceinline__ std::uint32_t lop3_and_or(std::uint32_t a, std::uint32_t b,
                                                     std::uint32_t c) {
  std::uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

__device__ __forceinline__ std::uint32_t cvt_rn_bf16x2(float high, float low) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ std::uint32_t cvt_rn_f16x2(float high, float low) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// Two e4m3 values as fp16, which has all of them; from compute capability 8.9 on.
__device__ __forceinline__ std::uint32_t cvt_rn_f16x2_e4m3x2(std::uint16_t bytes) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(bytes));
  return pair;
}

__device__ __forceinline__ std::uint32_t fma_rn_bf16x2(std::uint32_t a, std::uint32_t b,
                                                       std::uint32_t c) {
  std::uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
__device__ __forceinline__ std::uint32_t mul_rn_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ __forceinline__ std::uint32_t add_rn_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

/// These two from 9.0 on.
__device__ __forceinline__ std::uint32_t mul_rn_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ __forceinline__ std::uint32_t sub_rn_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

/// Nanoseconds of a clock that all multiprocessors share.
__device__ __forceinline__ unsigned long long globaltimer() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace moegemm::cuda::ptx
