#pragma once

#include <cstdint>

#include "cuda/device/element.cuh"
#include "cuda/device/segments.cuh"
#include "moegemm/tensor.h"

/// Reading and writing tensor elements as fp32. Where the dtype is a run-time value the branch is
/// the same for the whole grid and costs nothing beside the memory access.
namespace moegemm::cuda {

__device__ inline float load_float(const void* base, DType dtype, std::int64_t i) {
  return with_format(FloatingFormats(), dtype, [&]<DType D>() {
    return to_float(static_cast<const ElementType<D>*>(base)[i]);
  });
}

__device__ inline void store_float(void* base, DType dtype, std::int64_t i, float value) {
  with_format(FloatingFormats(), dtype,
              [&]<DType D>() { round_to(static_cast<ElementType<D>*>(base)[i], value); });
}

/// An element of an int32 or int64 tensor.
__device__ inline std::int64_t load_index(const void* base, bool is_64_bit, std::int64_t i) {
  return is_64_bit ? static_cast<const std::int64_t*>(base)[i]
                   : static_cast<std::int64_t>(static_cast<const std::int32_t*>(base)[i]);
}

/// A matrix, or a vector, of any floating format. Null data: not given.
struct Floats {
  void* data;
  DType dtype;
  std::int64_t stride;  // between rows

  __device__ __forceinline__ float load(std::int64_t i) const { return load_float(data, dtype, i); }
  __device__ __forceinline__ void store(std::int64_t i, float value) const {
    store_float(data, dtype, i, value);
  }

  /// Called by a whole warp.
  __device__ void zero_row(std::int64_t row, int columns) const {
    if (!data) return;
    for (int c = threadIdx.x % kWarpSize; c < columns; c += kWarpSize) {
      store(row * stride + c, 0.0f);
    }
  }
};

inline Floats floats_of(const TensorView& view) {
  return {view.given() ? view.data : nullptr, view.dtype, view.row_stride};
}

inline IndexArray indices_of(const TensorView& view) {
  return {view.given() ? view.data : nullptr, view.dtype == DType::kInt64};
}

__device__ inline void store_index(void* base, bool is_64_bit, std::int64_t i, std::int64_t value) {
  if (is_64_bit) {
    static_cast<std::int64_t*>(base)[i] = value;
  } else {
    static_cast<std::int32_t*>(base)[i] = static_cast<std::int32_t>(value);
  }
}

/// Eight consecutive elements, moved by 16-byte accesses and kept as they are in memory until they
/// are used, so that many loads are in flight before the first one is waited for.
constexpr int kPackElems = 8;

template <typename T>
struct Pack {
  uint4 bits;
};
template <>
struct Pack<float> {
  float4 low, high;
};

/// `source` is 16-byte aligned. Streaming: what the passes read they read once.
template <typename T>
__device__ inline Pack<T> load_pack(const T* source) {
  return {__ldcs(reinterpret_cast<const uint4*>(source))};
}
template <>
__device__ inline Pack<float> load_pack(const float* source) {
  const auto* quads = reinterpret_cast<const float4*>(source);
  return {__ldcs(quads), __ldcs(quads + 1)};
}

/// The same for what others read too: it stays in the caches.
template <typename T>
__device__ inline Pack<T> load_shared_pack(const T* source) {
  return {*reinterpret_cast<const uint4*>(source)};
}
template <>
__device__ inline Pack<float> load_shared_pack(const float* source) {
  const auto* quads = reinterpret_cast<const float4*>(source);
  return {quads[0], quads[1]};
}

template <typename T>
__device__ inline void unpack(const Pack<T>& pack, float (&values)[kPackElems]) {
  const unsigned words[4] = {pack.bits.x, pack.bits.y, pack.bits.z, pack.bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = pair_to_float(words[i], T());
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}
template <>
__device__ inline void unpack(const Pack<float>& pack, float (&values)[kPackElems]) {
  values[0] = pack.low.x;
  values[1] = pack.low.y;
  values[2] = pack.low.z;
  values[3] = pack.low.w;
  values[4] = pack.high.x;
  values[5] = pack.high.y;
  values[6] = pack.high.z;
  values[7] = pack.high.w;
}

/// The first or the last four of a pack.
template <typename T>
__device__ inline void unpack_quad(const Pack<T>& pack, int half, float (&values)[4]) {
  const float2 first = pair_to_float(half == 0 ? pack.bits.x : pack.bits.z, T());
  const float2 second = pair_to_float(half == 0 ? pack.bits.y : pack.bits.w, T());
  values[0] = first.x;
  values[1] = first.y;
  values[2] = second.x;
  values[3] = second.y;
}
template <>
__device__ inline void unpack_quad(const Pack<float>& pack, int half, float (&values)[4]) {
  const float4 quad = half == 0 ? pack.low : pack.high;
  values[0] = quad.x;
  values[1] = quad.y;
  values[2] = quad.z;
  values[3] = quad.w;
}

template <typename T>
__device__ inline Pack<T> round_pack(const float (&v)[kPackElems]) {
  return {make_uint4(round_pair(v[0], v[1], T()), round_pair(v[2], v[3], T()),
                     round_pair(v[4], v[5], T()), round_pair(v[6], v[7], T()))};
}
template <>
__device__ inline Pack<float> round_pack(const float (&v)[kPackElems]) {
  return {make_float4(v[0], v[1], v[2], v[3]), make_float4(v[4], v[5], v[6], v[7])};
}

/// `target` is 16-byte aligned.
template <typename T>
__device__ inline void store_raw_pack(T* target, const Pack<T>& pack) {
  *reinterpret_cast<uint4*>(target) = pack.bits;
}
template <>
__device__ inline void store_raw_pack(float* target, const Pack<float>& pack) {
  auto* quads = reinterpret_cast<float4*>(target);
  quads[0] = pack.low;
  quads[1] = pack.high;
}

template <typename T>
__device__ inline void store_pack_as(T* target, const float (&v)[kPackElems]) {
  store_raw_pack(target, round_pack<T>(v));
}

/// Elements i to i + 7 of a matrix of T, or of fp32.
template <typename T>
__device__ inline void store_pack_in(void* base, bool fp32, std::int64_t i,
                                     const float (&v)[kPackElems]) {
  if (fp32) {
    store_pack_as(static_cast<float*>(base) + i, v);
  } else {
    store_pack_as(static_cast<T*>(base) + i, v);
  }
}

/// Elements i to i + 3 of a matrix of T, or of fp32: half a pack.
template <typename T>
__device__ inline void store_quad_in(void* base, bool fp32, std::int64_t i, const float (&v)[4]) {
  if constexpr (sizeof(T) == 2) {
    if (!fp32) {
      *reinterpret_cast<uint2*>(static_cast<T*>(base) + i) =
          make_uint2(round_pair(v[0], v[1], T()), round_pair(v[2], v[3], T()));
      return;
    }
  }
  *reinterpret_cast<float4*>(static_cast<float*>(base) + i) = make_float4(v[0], v[1], v[2], v[3]);
}

/// Elements i to i + 7, whose first is 16-byte aligned.
__device__ inline void store_pack(void* base, DType dtype, std::int64_t i,
                                  const float (&v)[kPackElems]) {
  with_format(FloatingFormats(), dtype,
              [&]<DType D>() { store_pack_as(static_cast<ElementType<D>*>(base) + i, v); });
}

}  // namespace moegemm::cuda
