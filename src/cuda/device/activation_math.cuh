#pragma once

#include <cstdint>

#include "core/types/constant_of.h"
#include "cuda/ptx/arithmetic.cuh"
#include "moegemm/epilogue.h"

/// Activations of single elements, with their derivatives. An H200 has time for 42 instructions per
/// element while memory moves the 6 bytes of a 16-bit gated activation, so they are few:
/// exponentials and reciprocals are the hardware's approximations, with denormals flushed (a few
/// fp32 ulps, far below the rounding of 16-bit results), and clamps single instructions.
///
/// The pass after a product and the product that activates its own rows give the same bits: what
/// makes a value leaves the compiler no choice between a product with a sum and a fused one.
namespace moegemm::cuda {

/// f(g) and f'(g).
struct Point {
  float value;
  float slope;
};

/// sigmoid(scale * x); 0 where the exponential overflows.
__device__ __forceinline__ float sigmoid(float x, float scale = 1.0f) {
  constexpr float kLog2E = 1.4426950408889634f;
  return ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(x * (-kLog2E * scale)));
}

template <ActivationFunction F>
__device__ Point activation_at(float g, float alpha);

template <>
__device__ __forceinline__ Point activation_at<ActivationFunction::kSilu>(float g, float alpha) {
  const float s = sigmoid(g, alpha);
  return {g * s, s * fmaf(alpha * g, 1.0f - s, 1.0f)};
}

template <>
__device__ __forceinline__ Point activation_at<ActivationFunction::kGelu>(float g, float) {
  constexpr float kDensityAtZero = 0.39894228040143268f;  // 1 / sqrt(2 pi)
  const float below = normcdff(g);
  return {g * below, fmaf(g * kDensityAtZero, __expf(-0.5f * g * g), below)};
}

template <>
__device__ __forceinline__ Point activation_at<ActivationFunction::kGeluTanh>(float g, float) {
  // (1 + tanh y) / 2 = sigmoid(2 y), which has no cancellation for negative y.
  constexpr float kScale = 2.0f * 0.79788456080286536f;  // 2 sqrt(2 / pi)
  constexpr float kCubic = 0.044715f;
  const float s = sigmoid(kScale * g * fmaf(kCubic * g, g, 1.0f));
  const float inner = kScale * fmaf(3.0f * kCubic * g, g, 1.0f);
  return {g * s, s * fmaf(g * (1.0f - s), inner, 1.0f)};
}

template <>
__device__ __forceinline__ Point activation_at<ActivationFunction::kRelu2>(float g, float) {
  const float positive = g < 0.0f ? 0.0f : g;  // NaN stays
  return {positive * positive, 2.0f * positive};
}

template <>
__device__ __forceinline__ Point activation_at<ActivationFunction::kRelu>(float g, float) {
  return {g < 0.0f ? 0.0f : g, g <= 0.0f ? 0.0f : 1.0f};  // NaN stays
}

/// What a gate's f is multiplied by.
__device__ __forceinline__ float up_factor(const Activation& a, float up) {
  return ptx::max_nan(ptx::min_nan(up, a.limit), -a.limit) + a.up_offset;
}

/// The activation of one element and its derivatives.
struct Activated {
  float act;
  float d_gate;
  float d_up;
};

template <ActivationFunction F, bool Gated>
__device__ __forceinline__ Activated evaluate(const Activation& a, float gate, float up) {
  const Point f = activation_at<F>(ptx::min_nan(gate, a.limit), a.alpha);
  const float d_gate = gate > a.limit ? 0.0f : f.slope;
  if constexpr (!Gated) {
    return {f.value, d_gate, 0.0f};
  }
  const float factor = up_factor(a, up);
  return {f.value * factor, d_gate * factor, fabsf(up) > a.limit ? 0.0f : f.value};
}

/// Calls body with the function as a constant; the branch is the same for the whole grid.
template <typename Body>
__device__ __forceinline__ void with_function(ActivationFunction function, const Body& body) {
  with_constant<kActivationFunctions>(function, body);
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

}  // namespace moegemm::cuda
