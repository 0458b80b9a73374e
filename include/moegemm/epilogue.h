#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "moegemm/kinds.h"

/// What a product can do to its rows before it stores them.
namespace moegemm {

enum class ActivationFunction : std::uint8_t {
  kSilu,      ///< g * sigmoid(alpha * g)
  kGelu,      ///< g * Phi(g), with the error function
  kGeluTanh,  ///< its approximation with tanh
  kRelu2,     ///< max(g, 0)^2
  kRelu,      ///< max(g, 0)
};

/// Where a row of the first product holds its gate and its up columns.
enum class GateLayout : std::uint8_t {
  kNone,          ///< no gate: I columns
  kConcatenated,  ///< I gate columns, then I up columns
  kInterleaved,   ///< gate 0, up 0, gate 1, up 1, ...
};

/// Every function and every layout, by the names that callers give and messages print. What code
/// asks about all of them it reads here.
inline constexpr Named<ActivationFunction> kActivationFunctions[] = {
    {ActivationFunction::kSilu, "silu"},          {ActivationFunction::kGelu, "gelu"},
    {ActivationFunction::kGeluTanh, "gelu_tanh"}, {ActivationFunction::kRelu2, "relu2"},
    {ActivationFunction::kRelu, "relu"},
};
inline constexpr Named<GateLayout> kGateLayouts[] = {
    {GateLayout::kNone, "none"},
    {GateLayout::kConcatenated, "concatenated"},
    {GateLayout::kInterleaved, "interleaved"},
};

/// act = f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset), or f(min(gate, limit))
/// without a gate. SwiGLU is kSilu with the defaults; the clamped SwiGLU of gpt-oss has
/// alpha 1.702, limit 7 and up_offset 1.
struct Activation {
  ActivationFunction function = ActivationFunction::kSilu;
  GateLayout layout = GateLayout::kConcatenated;
  float alpha = 1.0f;  ///< kSilu only
  float limit = std::numeric_limits<float>::infinity();
  float up_offset = 0.0f;

  constexpr bool gated() const { return layout != GateLayout::kNone; }
  /// Columns of the first product for `activated` columns after the activation.
  constexpr std::int64_t input_columns(std::int64_t activated) const {
    return gated() ? 2 * activated : activated;
  }
  /// Columns after the activation for `inputs` columns of the first product.
  constexpr std::int64_t activated_columns(std::int64_t inputs) const {
    return gated() ? inputs / 2 : inputs;
  }
  bool operator==(const Activation&) const = default;
};

MOEGEMM_API const char* to_string(ActivationFunction function);
MOEGEMM_API const char* to_string(GateLayout layout);
/// "silu/concatenated", and " alpha=1.702 limit=7 up_offset=1" where they are not the defaults.
MOEGEMM_API std::string to_string(const Activation& activation);
/// Reads such a text; throws kInvalidValue with what is accepted.
MOEGEMM_API Activation parse_activation(const std::string& text);

}  // namespace moegemm
