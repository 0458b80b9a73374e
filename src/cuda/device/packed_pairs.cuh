#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstdint>

#include "cuda/device/host_device.h"

/// For loops of functions that the host compiler builds, too.
#if defined(__CUDA_ARCH__)
#define MOEGEMM_UNROLL _Pragma("unroll")
#else
#define MOEGEMM_UNROLL
#endif

/// Two 16-bit numbers in a register, the first in the low half: one instruction each on the GPU,
/// the same bits on the host, where the maths of kernels is tested. The last argument says which
/// type they have.
namespace moegemm::cuda {

/// prmt: byte i of the result is the byte of {a, b} that nibble i of the selector names; with 8
/// added, eight copies of that byte's highest bit.
MOEGEMM_HOST_DEVICE std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b,
                                                std::uint32_t selector) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
#else
  const std::uint64_t bytes = std::uint64_t{b} << 32 | a;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t nibble = selector >> 4 * i & 15;
    const auto byte = static_cast<std::uint32_t>(bytes >> 8 * (nibble & 7)) & 0xff;
    result |= (nibble < 8 ? byte : (byte >> 7) * 0xff) << 8 * i;
  }
  return result;
#endif
}

/// (a & b) | c in one instruction, whatever is constant.
MOEGEMM_HOST_DEVICE std::uint32_t and_or(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
#if defined(__CUDA_ARCH__)
  std::uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#else
  return (a & b) | c;
#endif
}

/// The two as fp32.
struct FloatPair {
  float low;
  float high;
};
MOEGEMM_HOST_DEVICE FloatPair floats_of(std::uint32_t pair, __nv_bfloat16) {
  return {std::bit_cast<float>(pair << 16), std::bit_cast<float>(pair & 0xffff0000u)};
}
MOEGEMM_HOST_DEVICE FloatPair floats_of(std::uint32_t pair, __half) {
  const auto half = [&](int shift) {
    __half_raw raw;
    raw.x = static_cast<unsigned short>(pair >> shift);
    return __half2float(__half(raw));
  };
  return {half(0), half(16)};
}

/// Each rounded once.
MOEGEMM_HOST_DEVICE std::uint32_t pair_of(const FloatPair& floats, __nv_bfloat16) {
#if defined(__CUDA_ARCH__)
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(floats.high), "f"(floats.low));
  return pair;
#else
  const auto bits = [](float value) {
    return std::uint32_t{static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(value)).x};
  };
  return bits(floats.low) | bits(floats.high) << 16;
#endif
}
MOEGEMM_HOST_DEVICE std::uint32_t pair_of(const FloatPair& floats, __half) {
#if defined(__CUDA_ARCH__)
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(floats.high), "f"(floats.low));
  return pair;
#else
  const auto bits = [](float value) {
    return std::uint32_t{static_cast<__half_raw>(__float2half_rn(value)).x};
  };
  return bits(floats.low) | bits(floats.high) << 16;
#endif
}

/// Products, each rounded once; subnormal numbers are numbers.
MOEGEMM_HOST_DEVICE std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b, __nv_bfloat16) {
#if defined(__CUDA_ARCH__)
  std::uint32_t product;  // sm_80 has no product alone
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
#else
  const FloatPair x = floats_of(a, __nv_bfloat16{}), y = floats_of(b, __nv_bfloat16{});
  return pair_of({x.low * y.low, x.high * y.high}, __nv_bfloat16{});
#endif
}
MOEGEMM_HOST_DEVICE std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b, __half) {
#if defined(__CUDA_ARCH__)
  std::uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
#else
  const FloatPair x = floats_of(a, __half{}), y = floats_of(b, __half{});
  return pair_of({x.low * y.low, x.high * y.high}, __half{});
#endif
}

/// Sums, each rounded once.
MOEGEMM_HOST_DEVICE std::uint32_t add_pairs(std::uint32_t a, std::uint32_t b, __nv_bfloat16) {
#if defined(__CUDA_ARCH__)
  std::uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3f803f80u), "r"(b));
  return sum;
#else
  const FloatPair x = floats_of(a, __nv_bfloat16{}), y = floats_of(b, __nv_bfloat16{});
  return pair_of({x.low + y.low, x.high + y.high}, __nv_bfloat16{});
#endif
}
MOEGEMM_HOST_DEVICE std::uint32_t add_pairs(std::uint32_t a, std::uint32_t b, __half) {
#if defined(__CUDA_ARCH__)
  std::uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
#else
  const FloatPair x = floats_of(a, __half{}), y = floats_of(b, __half{});
  return pair_of({x.low + y.low, x.high + y.high}, __half{});
#endif
}

}  // namespace moegemm::cuda
