#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "moegemm/kinds.h"

/// Number formats on the GPU: which there are, the type that stores each, and its conversions. The
/// instructions that multiply a format are in ptx/.
namespace moegemm::cuda {

template <DType... Ds>
struct Formats {};
using FloatingFormats = Formats<DType::kBFloat16, DType::kFloat16, DType::kFloat32>;
/// Those that tensor cores multiply exactly.
using TensorCoreFormats = Formats<DType::kBFloat16, DType::kFloat16>;

template <DType D>
struct ElementOf;
template <>
struct ElementOf<DType::kBFloat16> {
  using Type = __nv_bfloat16;
};
template <>
struct ElementOf<DType::kFloat16> {
  using Type = __half;
};
template <>
struct ElementOf<DType::kFloat32> {
  using Type = float;
};
template <DType D>
using ElementType = typename ElementOf<D>::Type;

/// body.operator()<D>() where D is `dtype`, one of the formats.
template <DType D, DType... Others, typename Body>
constexpr decltype(auto) with_format(Formats<D, Others...>, DType dtype, const Body& body) {
  if constexpr (sizeof...(Others) > 0) {
    if (dtype != D) return with_format(Formats<Others...>(), dtype, body);
  }
  return body.template operator()<D>();
}

/// body.operator()<D>() for each of the formats.
template <DType... Ds, typename Body>
void for_each_format(Formats<Ds...>, const Body& body) {
  (body.template operator()<Ds>(), ...);
}

#if defined(__CUDACC__)
__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ inline void round_to(float& target, float value) { target = value; }
__device__ inline void round_to(__half& target, float value) { target = __float2half_rn(value); }
__device__ inline void round_to(__nv_bfloat16& target, float value) {
  target = __float2bfloat16_rn(value);
}

/// Two results, rounded to 16 bits each, in one register: the first in the low half. The last
/// argument says to which type.
__device__ __forceinline__ std::uint32_t round_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
__device__ __forceinline__ std::uint32_t round_pair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

/// The other way.
__device__ inline float2 pair_to_float(std::uint32_t bits, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}
__device__ inline float2 pair_to_float(std::uint32_t bits, __nv_bfloat16) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits));
}
#endif

}  // namespace moegemm::cuda
