#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "moegemm/epilogue.h"
#include "moegemm/execution.h"
#include "moegemm/kinds.h"
#include "moegemm/ops.h"
#include "moegemm/quantization.h"
#include "moegemm/tensor.h"

/// The passes of an expert layer around its products: routing and the top-k sum, activations, the
/// gradients of biases, quantised weights and low-rank factors. E experts, T tokens, M = T * topk
/// rows, I activated columns. Arithmetic is fp32, rounded once. Every element of an output is
/// written; rows outside every segment are zero, or left alone with Tails::kUndefined: see ops.h.
namespace moegemm {

/// Sorts the M = T * topk routed rows by expert, stably.
///   expert_ids     [T, topk] int32 or int64, any row stride. Ids outside [0, E) (for instance -1,
///                  "not on this rank") fall to the end, outside every segment
///   m_sizes        [E] int32 or int64, written: rows of each expert
///   gather_indices [M] same dtype as m_sizes, written: flat index of the row at position r
///   inverse        [M] same dtype, written if given: position of flat row i
///   workspace      CUDA only: route_workspace_bytes() bytes on the device, any contents
MOEGEMM_API void route(const TensorView& expert_ids, std::int64_t num_experts,
                       const TensorView& m_sizes, const TensorView& gather_indices,
                       const TensorView& inverse = {}, void* workspace = nullptr,
                       const ExecutionContext& context = {});

/// Bytes of device memory that `route` needs for this many rows and experts; 0 on the CPU.
MOEGEMM_API std::int64_t route_workspace_bytes(std::int64_t rows, std::int64_t num_experts,
                                               Device device);

/// out[t] = sum over s of weights[t * topk + s] * rows[t * topk + s], in fp32, s ascending, rounded
/// once.  rows [M, C] in flat order; weights [M] or [T, topk], fp32 or rows' dtype, or not given (a
/// plain sum); out [T, C] in rows' dtype or fp32.
MOEGEMM_API void combine(const TensorView& rows, const TensorView& weights, std::int64_t topk,
                         const TensorView& out, const ExecutionContext& context = {});

// Rows as a capacity: many ids are those of other ranks' experts and take no row, and nothing of
// T * topk rows exists. And what surrounds an exchange of rows between ranks.

struct RouteLimits {
  TensorView num_tokens;  ///< [1] int32 or int64, or not given: tokens from that one on take no
                          ///< row, and their ids are not read
  TensorView overflow;    ///< [1] int32 or int64, or not given: becomes 1 if rows were dropped,
                          ///< else it is left alone
  bool check = false;     ///< names the first row that would be dropped: synchronises.
                          ///< MOEGEMM_CHECK=1 in the environment turns it on everywhere
};

/// Sorts by expert, stably, the rows that have one.
///   expert_ids     [T, topk] int32 or int64, any row stride; ids outside [0, E) take no row
///   m_sizes        [E] int32 or int64, written: rows of each expert
///   gather_indices [R] same dtype as m_sizes, R a capacity, written: flat index of the row at
///                  position r, -1 where there is none
///   positions      [T, topk] same dtype, dense, written: position of the row of slot s of token t,
///                  -1 where there is none
///   workspace      CUDA only: route_workspace_bytes(T * topk, E) bytes on the device
/// Of more than R rows those at the last positions are dropped; m_sizes counts what is kept.
MOEGEMM_API void route_compact(const TensorView& expert_ids, std::int64_t experts,
                               const TensorView& m_sizes, const TensorView& gather_indices,
                               const TensorView& positions, const RouteLimits& limits = {},
                               void* workspace = nullptr, const ExecutionContext& context = {});

/// out[t] = sum over s of weights[t, s] * rows[positions[t, s]], in fp32, s ascending, rounded
/// once; a position outside [0, R) adds nothing.  rows [R, C], any order; positions [T, topk] int32
/// or int64, dense; weights [T, topk] or [T * topk], fp32 or rows' dtype, or not given (a plain
/// sum); out [T, C] in rows' dtype or fp32. The bits of `combine` where every slot has a row.
MOEGEMM_API void combine_rows(const TensorView& rows, const TensorView& weights,
                              const TensorView& positions, const TensorView& out,
                              const ExecutionContext& context = {});

/// What is sent for each token: out[positions[t, s]] = rows[t], to the bit. A position outside
/// [0, R) takes none.  rows [T, C], floating; positions [T, topk] int32 or int64, dense; out [R, C]
/// in rows' dtype. gather_indices [R], as route_compact makes them, or not given: rows of `out`
/// whose index is outside [0, T * topk) become zero. Without them positions must name every row of
/// `out`: a row that they do not is not written.
MOEGEMM_API void spread_rows(const TensorView& rows, const TensorView& positions,
                             const TensorView& gather_indices, const TensorView& out,
                             const ExecutionContext& context = {});

/// For tokens that are sent once to each rank which has an expert of theirs; rank r has those from
/// r * experts_of_rank on.
///   expert_ids     [T, topk] int32 or int64, dense
///   ranks_of_slots [T, topk] int64, dense, written: the rank of each slot's expert; -1 for an id
///                  that names none, and where an earlier slot of the token has the same rank
///   pairs          [ranks] int64, written: slots whose expert is on each rank
MOEGEMM_API void first_slots(const TensorView& expert_ids, std::int64_t experts_of_rank,
                             const TensorView& ranks_of_slots, const TensorView& pairs,
                             const ExecutionContext& context = {});

/// ids [R, topk] int64, written: the experts of the tokens that are sent, as their targets count
/// them, and -1 for those of other ranks. gather_indices [R]: the flat slot that each row is sent
/// for, whose expert's rank is its target; one outside [0, T * topk) has no experts.
MOEGEMM_API void ids_at_target(const TensorView& expert_ids, const TensorView& gather_indices,
                               std::int64_t experts_of_rank, const TensorView& ids,
                               const ExecutionContext& context = {});

/// Rows that came from several ranks, sorted by expert, those of an expert in the order of ranks.
///   counts         [ranks, E] int32 or int64, any row stride: rows of each rank for each expert;
///                  a rank's rows come in the order of experts
///   room           rows that each rank has a place for, filled from the first on, R or more for
///                  all ranks together; -1: the ranks' rows follow one another
///   m_sizes        [E] int32 or int64, written: rows of each expert
///   gather_indices [R] same dtype, written: the row at position r, -1 where there is none
///   expert_ids     [R] int64, written: the expert of each row, E for one that no count tells of
/// Negative counts are 0, and rows past the last or past their rank's room are left out: -1 at
/// their positions.
MOEGEMM_API void index_arrivals(const TensorView& counts, std::int64_t room,
                                const TensorView& m_sizes, const TensorView& gather_indices,
                                const TensorView& expert_ids, const ExecutionContext& context = {});

// Activations, biases and router weights.

/// One pass over the rows that serves the backward of `multiply`, with g = gather_indices[r]:
///   dot[g]     = <product[r], x[r]>       fp32 sum, rounded once to dot's dtype
///   scaled[r]  = router_weights[g] * product[r]
///   scaled_x[r] = router_weights[g] * x[r]  when given
/// product, scaled [M, K] (may be the same memory); x, scaled_x [M, K]; dot [M]. Rows past
/// sum(m_sizes) are zero in scaled and scaled_x; flat slots that no row names are zero in dot.
MOEGEMM_API void scale_rows(const TensorView& product, const TensorView& x,
                            const RoutingView& routing, const TensorView& scaled,
                            const TensorView& dot, const TensorView& scaled_x = {},
                            const ExecutionContext& context = {});

/// act[r] = activation(pre[r] + bias[e]) for the rows r of each expert e.
///   pre   [M, C] with C = I or 2 I
///   bias  [E, C] of pre's dtype, or not given
///   act   [M, I] in pre's dtype or fp32
/// Of `routing` only the segments count, and router_weights, if given: [M], one for each row, that
/// its activation is multiplied by before it is rounded.
MOEGEMM_API void activate(const TensorView& pre, const TensorView& bias, const RoutingView& routing,
                          const Activation& activation, const TensorView& act,
                          const ExecutionContext& context = {});

/// What the backward of an activation reads. With g = gather_indices[r] and w = router_weights[g]
/// (1 if not given), the layer's output is out[t] = sum over slots of w * (act[r] W_down^T +
/// down_bias).
struct ActivationGradientInputs {
  TensorView d_act;      ///< [M, I]: d_out[g / topk] W_down, without w; pre's dtype or fp32
  TensorView pre;        ///< [M, C], as for `activate`
  TensorView bias;       ///< [E, C] or not given
  TensorView d_out;      ///< [T, H] of pre's dtype; given together with down_bias
  TensorView down_bias;  ///< [E, H]; adds <d_out[g / topk], down_bias[e]> to the gradient of w
};

struct ActivationGradientOutputs {
  TensorView d_pre;         ///< [M, C]: w * d_act * activation'; pre's dtype or fp32
  TensorView weighted_act;  ///< [M, I]: w * act, the rows of dW_down; pre's dtype or fp32; if
                            ///< given. May be the memory of d_act
  TensorView d_weights;     ///< [T * topk], flat order: <d_act[r], act[r]> at g (plus the down
                            ///< bias's share); fp32 or pre's dtype; if given. What no row names
                            ///< is zero
};

/// The gradient of an activation in one pass that also recomputes it. With gather_indices,
/// router_weights and d_weights say what indices are in range: the M rows of `pre` may be more or
/// fewer than T * topk. A row whose index is out of range is zero in every output. Without them
/// row r has weight r and token r, and topk is 1.
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

/// out[r] = rows[r] + w * bias[e] for the rows r of each expert e, in fp32, rounded once: the bias
/// of a product whose rows were multiplied by weights before it.
///   rows     [M, C] in out's dtype or fp32; may be the memory of out
///   bias     [E, C] of out's dtype
///   routing  router_weights [M], one for each row; no gather_indices
MOEGEMM_API void add_weighted_bias(const TensorView& rows, const TensorView& bias,
                                   const RoutingView& routing, const TensorView& out,
                                   const ExecutionContext& context = {});

/// out[r] = a[r] + b[r] for the rows r of every segment, in fp32, rounded once: the sum of two
/// products.
///   a, b     [M, C] fp32; a may be the memory of out
///   routing  only the segments count
///   out      [M, C] of any floating dtype
MOEGEMM_API void add_rows(const TensorView& a, const TensorView& b, const RoutingView& routing,
                          const TensorView& out, const ExecutionContext& context = {});

/// out[e, n, k] = value * scale in fp32, rounded once: a quantised W as an ordinary tensor.
///   packed   [E, N, K] of out's dtype, dense; its data are the packed values
///   scales   those of `quantization`: see ScalesView
///   out      [E, N, K] of any floating dtype, dense
MOEGEMM_API void dequantise_weights(const TensorView& packed, const ScalesView& scales,
                                    const Quantization& quantization, const TensorView& out,
                                    const ExecutionContext& context = {});

// The factors of low-rank parts (GemmOptions::low_rank_weights), which their owners keep in other
// layouts and formats than the products read: PEFT has B as [N, r, E] in fp32.

/// A stack [E, rows, columns] that somebody else owns, with any strides, in elements.
struct StridedStack {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::array<std::int64_t, 3> shape = {};
  std::array<std::int64_t, 3> strides = {};
  Device device;
};

/// Products want ranks in steps of 16 bytes of a 16-bit row: what a GPU's fast copies need.
constexpr std::int64_t padded_rank(std::int64_t rank) {
  constexpr std::int64_t kRankStep = 8;
  return (rank + kRankStep - 1) / kRankStep * kRankStep;
}

/// to[e, i, j] = scaling * from[e, i, j] in fp32, rounded once. `to` has as many experts and at
/// least as many rows and columns; what it has more is zero.
struct FactorCopy {
  StridedStack from;
  StridedStack to;
  float scaling = 1.0f;
};

/// All copies, on a GPU in one launch for every eight. No `to` may be in the memory of another
/// tensor. With m_sizes, [E] int32 or int64, experts of size 0 or less are left out: their part of
/// `to` stays as it is.
MOEGEMM_API void copy_factors(std::span<const FactorCopy> copies, const TensorView& m_sizes = {},
                              const ExecutionContext& context = {});

/// The thin product of few rows, straight from a factor as its owner keeps it: rows[r] = x[r] A_e^T
/// for the rows r of each expert e, with the bits of a forward whose W is copy_factors of it.
///   x        [T, K] with routing.gather_indices, as permute_x, else [M, K]; bf16 or fp16
///   factor   [E, r, K] in x's dtype or fp32
///   routing  m_sizes, gather_indices and topk; segments follow one another
///   rows     [M, padded_rank(r)] in x's dtype; what is in no segment stays as it is
/// On a GPU, with K a multiple of 8, columns side by side and every row aligned to 16 bytes; else
/// it is refused as not implemented.
MOEGEMM_API void factor_rows(const TensorView& x, const StridedStack& factor,
                             const RoutingView& routing, const TensorView& rows,
                             const ExecutionContext& context = {});

}  // namespace moegemm
