#pragma once

#include <array>
#include <cstdint>

#include "moegemm/kinds.h"
#include "moegemm/ops.h"
#include "moegemm/problem.h"
#include "moegemm/tensor.h"
#include "moegemm/tune.h"

/// The rules of a call, apart from running it. `forward` and its like follow them too; a front end
/// that makes the output itself, or copies operands into order first, describes the call before it
/// allocates anything, and then runs what was described.
namespace moegemm {

/// What a caller calls its arguments, so that refusals speak its language.
struct CallerWords {
  const char* x = "x";
  const char* w = "w";
  const char* w_scales = "w_scales";
  const char* w_up = "w_up";
  const char* dy = "dy";
  const char* out = nullptr;  ///< null: "y", "dx" or "dw"
  const char* router_weights = "router_weights";
  const char* multiply = "multiply";
  const char* tma_load_rows = "config.tma_load_rows";
  const char* tma_load_weights = "config.tma_load_weights";
  const char* tma_store = "config.tma_store";
  const char* yes = "true";
  const char* no = "false";
  const char* none = "not given";
};

/// A product that follows the rules, before its memory is known.
struct Description {
  Problem
      problem;  ///< its alignments are the best there are, its out_dtype that of X without `out`
  int out_rank = 0;
  std::array<std::int64_t, 3> out_shape = {};  ///< the first `out_rank` entries count
  CallerWords words;
};

/// What a call of `op` asks for and what it makes, or a refusal (Error with the argument, its value
/// and the rule). `first` is X or dY, `second` W or X, as for `forward`, `backward_dx` and
/// `backward_dw`; `out` may be left out. Pointers and strides are not looked at.
MOEGEMM_API Description describe(Op op, const TensorView& first, const TensorView& second,
                                 const RoutingView& routing, const GemmOptions& options = {},
                                 const TensorView& out = {}, const CallerWords& words = {});

/// The rules of a kernel that is asked for by hand, before there is a product to describe.
MOEGEMM_API void check_config(const KernelConfig& config, Op op, Permutation permutation,
                              const CallerWords& words = {});

/// Runs what was described, on tensors with the shapes, dtypes and devices that were described; the
/// output has `out_shape`. Only what memory can get wrong is refused: strides, pointers, overlap.
MOEGEMM_API Plan run(const Description& description, const TensorView& first,
                     const TensorView& second, const TensorView& out, const RoutingView& routing,
                     const GemmOptions& options, const ExecutionContext& context);

/// Measures it instead: see tune_forward.
MOEGEMM_API TuneReport tune(const Description& description, const TensorView& first,
                            const TensorView& second, const TensorView& out,
                            const RoutingView& routing, const GemmOptions& options,
                            const ExecutionContext& context, bool again = false);

/// The weights of an expert layer. E experts, I activated columns, C = I or with a gate 2 I.
struct ExpertWeightViews {
  TensorView w_gate_up;     ///< [E, C, H], or [E, H, C] with WeightLayout::kKn
  TensorView w_down;        ///< [E, H, I], or [E, I, H]
  TensorView gate_up_bias;  ///< [E, C] or not given
  TensorView down_bias;     ///< [E, H] or not given
  TensorView w_up = {};     ///< [E, I, H], or [E, H, I], beside a w_gate_up of the same shape that
                            ///< holds the gates alone; not given: w_gate_up holds both
};

/// The tensors of a whole expert layer of T tokens.
struct LayerViews {
  TensorView x;  ///< [T, H]
  ExpertWeightViews weights;
  TensorView expert_ids;      ///< [T, topk]
  TensorView router_weights;  ///< [T, topk] or not given; fp32 or x's dtype
};

/// The rules of a layer, from metadata as those of `describe`. Names in refusals are those of the
/// members.
MOEGEMM_API void check_layer(const LayerViews& views, const Activation& activation,
                             WeightLayout layout);

/// The tensors of an expert layer whose rows come and go in expert order.
struct ExpertRowsViews {
  TensorView rows;  ///< [R, H]
  ExpertWeightViews weights;
  TensorView sizes;        ///< [E]
  TensorView row_weights;  ///< [R] or not given; fp32 or the rows' dtype
};

MOEGEMM_API void check_expert_rows(const ExpertRowsViews& views, const Activation& activation,
                                   WeightLayout layout);

}  // namespace moegemm
