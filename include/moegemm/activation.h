#pragma once

#include "moegemm/epilogue.h"
#include "moegemm/export.h"
#include "moegemm/ops.h"
#include "moegemm/tensor.h"

/// What stands between the two products of an expert, and the gradients of its biases. E experts,
/// T tokens, M = T * topk rows in expert order, I activated columns. Arithmetic is fp32, rounded
/// once. Every element of an output is written; rows past sum(m_sizes) are zero.
namespace moegemm {

/// act[r] = activation(pre[r] + bias[e]) for the rows r of each expert e.
///   pre   [M, C] with C = I or 2 I
///   bias  [E, C] of pre's dtype, or not given
///   act   [M, I] in pre's dtype or fp32
MOEGEMM_API void activate(const TensorView& pre, const TensorView& bias, const TensorView& m_sizes,
                          const Activation& activation, const TensorView& act,
                          const ExecutionContext& context = {});

/// What the backward of an activation reads. With g = gather_indices[r] and w = router_weights[g]
/// (1 if not given), the layer's output is out[t] = sum over slots of w * (act[r] W_down^T +
/// b_down).
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
  TensorView d_weights;     ///< [T * topk], flat order: <d_act[r], act[r]> at g (plus the down
                            ///< bias's share); fp32 or pre's dtype; if given. What no row names
                            ///< is zero
};

/// The gradient of an activation in one pass that also recomputes it. gather_indices is needed for
/// router_weights and d_weights, which say what indices are in range: the M rows of `pre` may be
/// more or fewer than T * topk. A row whose index is out of range is zero in every output.
MOEGEMM_API void activate_backward(const ActivationGradientInputs& inputs,
                                   const RoutingView& routing, const Activation& activation,
                                   const ActivationGradientOutputs& outputs,
                                   const ExecutionContext& context = {});

/// sums[e] = sum over the rows r of expert e of w * rows[r], in fp32 and in a fixed order, rounded
/// once: the gradient of a bias.
///   rows     [M, C] in expert order, or with gather_indices, of any length, [T, C]: row r reads
///            rows[g / topk]
///   routing  router_weights, if given, need gather_indices
///   sums     [E, C] in rows' dtype or fp32
MOEGEMM_API void expert_sums(const TensorView& rows, const RoutingView& routing,
                             const TensorView& sums, const ExecutionContext& context = {});

}  // namespace moegemm
