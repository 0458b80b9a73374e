#pragma once

#include <cmath>
#include <numbers>

#include "moegemm/epilogue.h"

namespace moegemm::cpu {

/// f(g) and f'(g).
struct Point {
  float value;
  float slope;
};

/// What the CPU knows of an activation function: `at`, as the passes compute it in fp32, and
/// `exact`, f as the reference computes it.
template <ActivationFunction F>
struct Function;

template <>
struct Function<ActivationFunction::kSilu> {
  static Point at(float g, float alpha) {
    const float s = 1.0f / (1.0f + std::exp(-alpha * g));
    return {g * s, s * (1.0f + alpha * g * (1.0f - s))};
  }
  static double exact(double g, double alpha) { return g / (1 + std::exp(-alpha * g)); }
};

template <>
struct Function<ActivationFunction::kGelu> {
  static Point at(float g, float) {
    constexpr float kRootHalf = 0.70710678118654752f;
    constexpr float kDensityAtZero = 0.39894228040143268f;  // 1 / sqrt(2 pi)
    const float below = 0.5f * std::erfc(-g * kRootHalf);
    return {g * below, below + g * kDensityAtZero * std::exp(-0.5f * g * g)};
  }
  static double exact(double g, double) { return 0.5 * g * std::erfc(-g / std::numbers::sqrt2); }
};

/// (1 + tanh y) / 2 = 1 / (1 + exp(-2 y)), which has no cancellation for negative y.
template <>
struct Function<ActivationFunction::kGeluTanh> {
  static Point at(float g, float) {
    constexpr float kScale = 2.0f * 0.79788456080286536f;  // 2 sqrt(2 / pi)
    constexpr float kCubic = 0.044715f;
    const float square = kCubic * g * g;
    const float s = 1.0f / (1.0f + std::exp(-kScale * g * (1.0f + square)));
    return {g * s, s * (1.0f + g * (1.0f - s) * kScale * (1.0f + 3.0f * square))};
  }
  static double exact(double g, double) {
    const double y = std::sqrt(2 * std::numbers::inv_pi) * (g + 0.044715 * g * g * g);
    return g / (1 + std::exp(-2 * y));
  }
};

/// Comparisons that are false for NaN, which therefore stays.
template <>
struct Function<ActivationFunction::kRelu2> {
  static Point at(float g, float) {
    const float positive = g < 0.0f ? 0.0f : g;
    return {positive * positive, 2.0f * positive};
  }
  static double exact(double g, double) { return g < 0 ? 0.0 : g * g; }
};

template <>
struct Function<ActivationFunction::kRelu> {
  static Point at(float g, float) { return {g < 0.0f ? 0.0f : g, g <= 0.0f ? 0.0f : 1.0f}; }
  static double exact(double g, double) { return g < 0 ? 0.0 : g; }
};

}  // namespace moegemm::cpu
