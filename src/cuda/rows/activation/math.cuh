#pragma once

#include "cuda/rows/elements.cuh"
#include "moegemm/activation.h"

/// Activations of single elements and of packs of eight, with their derivatives. Exponentials and
/// divisions are the hardware's approximations: a few fp32 ulps, far below the rounding of 16-bit
/// results, and several times cheaper, which keeps the kernels bound by memory.
namespace moegemm::cuda {

/// f(g) and f'(g).
struct Point {
  float value;
  float slope;
};

__device__ __forceinline__ float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));  // 0 where the exponential overflows
}

template <ActivationFunction F>
__device__ __forceinline__ Point activation_at(float g, float alpha) {
  if constexpr (F == ActivationFunction::kSilu) {
    const float x = alpha * g;
    const float s = sigmoid(x);
    return {g * s, s * fmaf(x, 1.0f - s, 1.0f)};
  } else if constexpr (F == ActivationFunction::kGelu) {
    constexpr float kDensityAtZero = 0.39894228040143268f;  // 1 / sqrt(2 pi)
    const float below = normcdff(g);
    return {g * below, fmaf(g * kDensityAtZero, __expf(-0.5f * g * g), below)};
  } else if constexpr (F == ActivationFunction::kGeluTanh) {
    // (1 + tanh y) / 2 = sigmoid(2 y), which has no cancellation for negative y.
    constexpr float kScale = 2.0f * 0.79788456080286536f;  // 2 sqrt(2 / pi)
    constexpr float kCubic = 0.044715f;
    const float square = kCubic * g * g;
    const float s = sigmoid(kScale * g * (1.0f + square));
    const float inner = kScale * fmaf(3.0f, square, 1.0f);
    return {g * s, s * fmaf(g * (1.0f - s), inner, 1.0f)};
  } else {
    const float positive = g < 0.0f ? 0.0f : g;  // NaN stays
    return {positive * positive, 2.0f * positive};
  }
}

/// The activation of one element and its derivatives.
struct Activated {
  float act;
  float d_gate;
  float d_up;
};

template <ActivationFunction F, bool Gated>
__device__ __forceinline__ Activated evaluate(const Activation& a, float gate, float up) {
  // Selections instead of fminf: NaN stays.
  const bool gate_passes = !(gate > a.limit);
  const Point f = activation_at<F>(gate_passes ? gate : a.limit, a.alpha);
  const float d_gate = gate_passes ? f.slope : 0.0f;
  if constexpr (!Gated) {
    return {f.value, d_gate, 0.0f};
  }
  const bool up_passes = !(fabsf(up) > a.limit);
  const float factor = (up_passes ? up : copysignf(a.limit, up)) + a.up_offset;
  return {f.value * factor, d_gate * factor, up_passes ? f.value : 0.0f};
}

/// Calls body with the function as a constant; the branch is the same for the whole grid.
template <typename Body>
__device__ __forceinline__ void with_function(ActivationFunction function, const Body& body) {
  switch (function) {
    case ActivationFunction::kSilu:
      body.template operator()<ActivationFunction::kSilu>();
      break;
    case ActivationFunction::kGelu:
      body.template operator()<ActivationFunction::kGelu>();
      break;
    case ActivationFunction::kGeluTanh:
      body.template operator()<ActivationFunction::kGeluTanh>();
      break;
    case ActivationFunction::kRelu2:
      body.template operator()<ActivationFunction::kRelu2>();
      break;
  }
}

/// Where element c of a row has its gate and its up.
struct GateColumns {
  int step;
  int up;

  __device__ int gate_at(int c) const { return c * step; }
  __device__ int up_at(int c) const { return up + c * step; }
};

inline GateColumns gate_columns(const Activation& activation, std::int64_t activated) {
  const bool interleaved = activation.layout == GateLayout::kInterleaved;
  return {interleaved ? 2 : 1, interleaved ? 1 : static_cast<int>(activated)};
}

/// The memory of eight elements' gates and ups: one or two packs.
template <typename T, GateLayout L>
struct GatePacks {
  Pack<T> first;
  Pack<T> second;  ///< unused without a gate

  /// Elements c to c + 7 of a row of the first product; the row is 16-byte aligned and `activated`
  /// a multiple of 8.
  __device__ __forceinline__ static GatePacks load(const T* row, int c, int activated) {
    GatePacks packs;
    packs.first = load_pack(row + (L == GateLayout::kInterleaved ? 2 * c : c));
    if constexpr (L != GateLayout::kNone) {
      packs.second =
          load_pack(row + (L == GateLayout::kInterleaved ? 2 * c + kPackElems : activated + c));
    }
    return packs;
  }

  __device__ __forceinline__ void split(float (&gate)[kPackElems], float (&up)[kPackElems]) const {
    if constexpr (L == GateLayout::kInterleaved) {
      float low[kPackElems], high[kPackElems];
      unpack(first, low);
      unpack(second, high);
#pragma unroll
      for (int i = 0; i < kPackElems; ++i) {
        const auto at = [&](int j) { return j < kPackElems ? low[j] : high[j - kPackElems]; };
        gate[i] = at(2 * i);
        up[i] = at(2 * i + 1);
      }
    } else {
      unpack(first, gate);
      if constexpr (L == GateLayout::kConcatenated) unpack(second, up);
    }
  }
};

/// Stores what GatePacks::load loads.
template <GateLayout L>
__device__ __forceinline__ void store_gate_packs(void* base, DType dtype, std::int64_t row, int c,
                                                 int activated, const float (&gate)[kPackElems],
                                                 const float (&up)[kPackElems]) {
  if constexpr (L == GateLayout::kInterleaved) {
    float low[kPackElems], high[kPackElems];
#pragma unroll
    for (int i = 0; i < kPackElems; ++i) {
      (i < kPackElems / 2 ? low : high)[2 * i % kPackElems] = gate[i];
      (i < kPackElems / 2 ? low : high)[2 * i % kPackElems + 1] = up[i];
    }
    store_pack(base, dtype, row + 2 * c, low);
    store_pack(base, dtype, row + 2 * c + kPackElems, high);
  } else {
    store_pack(base, dtype, row + c, gate);
    if constexpr (L == GateLayout::kConcatenated) {
      store_pack(base, dtype, row + activated + c, up);
    }
  }
}

}  // namespace moegemm::cuda
