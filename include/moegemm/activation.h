#pragma once

#include <cstdint>
#include <limits>

#include "moegemm/export.h"
#include "moegemm/ops.h"
#include "moegemm/tensor.h"

/// What stands between the two products of an expert, and the gradients of its biases. E experts,
/// T tokens, M = T * topk rows in expert order, I activated columns. Arithmetic is fp32, rounded
/// once. Every element of an output is written; rows past sum(m_sizes) are zero.
namespace moegemm {

enum class ActivationFunction : std::uint8_t {
  kSilu,      ///< g * sigmoid(alpha * g)
  kGelu,      ///< g * Phi(g), with the error function
  kGeluTanh,  ///< its approximation with tanh
  kRelu2,     ///< max(g, 0)^2
};

/// Where a row of the first product holds its gate and its up columns.
enum class GateLayout : std::uint8_t {
  kNone,          ///< no gate: I columns
  kConcatenated,  ///< I gate columns, then I up columns
  kInterleaved,   ///< gate 0, up 0, gate 1, up 1, ...
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
  /// Columns of the first product for `activated` columns behind the activation.
  std::int64_t input_columns(std::int64_t activated) const {
    return gated() ? 2 * activated : activated;
  }
  bool operator==(const Activation&) const = default;
};

MOEGEMM_API const char* to_string(ActivationFunction function);  ///< "silu", "gelu", ...
MOEGEMM_API const char* to_string(GateLayout layout);  ///< "none", "concatenated", "interleaved"

/// act[r] = activation(pre[r] + bias[e]) for the rows r of each expert e.
///   pre   [M, C] with C = I or 2 I
///   bias  [E, C] of pre's dtype, or not given
///   act   [M, I] in pre's dtype or fp32
MOEGEMM_API void activate(const TensorView& pre, const TensorView& bias, const TensorView& m_sizes,
                          const Activation& activation, const TensorView& act,
                          const ExecutionContext& context = {});

/// What the backward of an activation reads. With g = gather_indices[r] and w = topk_weights[g] (1
/// if not given), the layer's output is out[t] = sum over slots of w * (act[r] W_down^T + b_down).
struct ActivationGradientInputs {
  TensorView d_act;      ///< [M, I]: d_out[g / topk] W_down, without w; pre's dtype or fp32
  TensorView pre;        ///< [M, C], as for `activate`
  TensorView bias;       ///< [E, C] or not given
  TensorView d_out;      ///< [T, H] of pre's dtype; given together with down_bias
  TensorView down_bias;  ///< [E, H]: its share of the gradient of w is <d_out[g / topk], b_down[e]>
};

struct ActivationGradientOutputs {
  TensorView d_pre;         ///< [M, C]: w * d_act * activation'; pre's dtype or fp32
  TensorView weighted_act;  ///< [M, I]: w * act, the rows of dW_down; pre's dtype or fp32; if
                            ///< given. May be the memory of d_act
  TensorView d_weights;     ///< [M], flat order: <d_act[r], act[r]> at g (plus the down bias's
                            ///< share); fp32 or pre's dtype; if given. What no row names is zero
};

/// The gradient of an activation in one pass that also recomputes it. gather_indices is needed for
/// topk_weights and d_weights; a row whose index is out of range is zero in every output.
MOEGEMM_API void activate_backward(const ActivationGradientInputs& inputs,
                                   const RoutingView& routing, const Activation& activation,
                                   const ActivationGradientOutputs& outputs,
                                   const ExecutionContext& context = {});

/// sums[e] = sum over the rows r of expert e of w * rows[r], in fp32 and in a fixed order, rounded
/// once: the gradient of a bias.
///   rows     [M, C] in expert order, or with gather_indices [T, C]: row r reads rows[g / topk]
///   routing  topk_weights, if given, need gather_indices
///   sums     [E, C] in rows' dtype or fp32
MOEGEMM_API void expert_sums(const TensorView& rows, const RoutingView& routing,
                             const TensorView& sums, const ExecutionContext& context = {});

}  // namespace moegemm
