#pragma once

#include <cstdint>
#include <optional>

#include "moegemm/epilogue.h"
#include "moegemm/execution.h"
#include "moegemm/kinds.h"
#include "moegemm/plan.h"
#include "moegemm/problem.h"
#include "moegemm/quantization.h"
#include "moegemm/tensor.h"

/// The three products of an MoE layer. E experts, T tokens, M = T * topk rows. Expert e owns the
/// m_sizes[e] consecutive rows that follow those of expert e-1 ("expert order"); flat order is row
/// t * topk + s for slot s of token t.
///
/// Every element of the output is written. Rows at positions >= sum(m_sizes) are zero in Y and dX
/// and add nothing to dW; an expert without rows gets a zero dW. Negative sizes count as 0,
/// segments are clipped at M, an index out of range reads as a zero row and its store is skipped.
/// In dW such a row is absent: what stands opposite it adds nothing.
///
/// M may also be a capacity, not T * topk: gather_indices has any length with permute_x and with
/// dy_per_token, and says how many rows there are in expert order. Indices are in [0, T * topk).
/// The rows of a result in flat order say how many that are.
///
/// Segments need not follow one another: RoutingView::starts says where each begins, and `ends`
/// that m_sizes holds cumulative ends. What lies outside every segment, gaps too, is zero in the
/// output or, with Tails::kUndefined, neither read nor written. A segment is clipped at both ends
/// of the rows. Where segments overlap, each element is that of one of them.
///
/// A result that is stored in flat order (Y with permute_y, dX with permute_x) is zero in every row
/// that no valid position names. Positions from sum(m_sizes) on name nothing: their indices are not
/// read. Where two positions name one row, each element is that of one of them.
namespace moegemm {

/// What the router decided. All views live on the device of X.
struct RoutingView {
  TensorView m_sizes;         ///< [E] int32 or int64: rows of each expert
  TensorView gather_indices;  ///< [M] int32 or int64: flat index of the row at expert-ordered
                              ///< position r; required by permute_x and permute_y
  TensorView router_weights;  ///< [M] (or [T, topk]) fp32 or X's dtype, flat order; required by
                              ///< multiply
  std::int64_t topk = 1;
  TensorView starts = {};  ///< [E] of the dtype of m_sizes: the first row of each expert; not
                           ///< given: segments follow one another
  bool ends = false;       ///< m_sizes holds where each expert's rows end, not how many there are
  Tails tails = Tails::kZero;
  std::int64_t expected_rows = -1;  ///< inside segments, about: what to plan for; -1: all rows

  Segments segments() const {
    return starts.given() ? Segments::kPlaced : ends ? Segments::kEnds : Segments::kPacked;
  }
};

struct GemmOptions {
  WeightLayout weight_layout = WeightLayout::kNk;  ///< of W or dW; [E, K, N] cannot multiply
  bool permute_x = false;     ///< X (or dX) is in flat order: the first GEMM of the layer
  bool permute_y = false;     ///< Y (or dY) is in flat order: the second GEMM of the layer
  bool multiply = false;      ///< scale row r by router_weights[gather_indices[r]] in fp32 (needs
                              ///< permute_y). dW: the row's contribution is scaled
  bool dy_per_token = false;  ///< dX and dW with permute_y: dy is [T, N] and row r reads
                              ///< dy[gather_indices[r] / topk]: the gradient of a token's sum
  bool accumulate = false;    ///< dW only: add to the fp32 output instead of overwriting it
  bool allow_tf32 = false;    ///< fp32 inputs may use TF32 tensor cores
  bool autotune = false;      ///< take the measured kernel instead of the predicted one (tune.h)
  bool check = false;         ///< validate m_sizes and indices on the device first: synchronises.
                              ///< MOEGEMM_CHECK=1 in the environment turns it on everywhere
  std::optional<BackendKind> backend;  ///< force one; else MOEGEMM_BACKEND, else the best
  std::optional<KernelConfig> config;  ///< ask for a kernel by hand; else the planner chooses
  /// Forward and dX: [E, columns of the product] of X's dtype, or not given. Added to the fp32
  /// result before multiply scales it, also to that of a row which reads as zeros.
  TensorView bias = {};
  /// Forward: W has the first half of the columns of Y, gates for instance, and this one the second
  /// half: both [E, N / 2, K], with rows of the same pitch. Not given: W has all of them. The bits
  /// are those of one W.
  TensorView w_up = {};
  /// Forward and dX: a low-rank part, both or neither. low_rank_rows [M, r], in expert order
  /// whatever the indices say, times low_rank_weights, which is W with a contraction of r: [E, N,
  /// r] for forward and [E, r, K] for dX, or [E, r, N] and [E, K, r] where W is [E, K, N]. It is
  /// added to the fp32 sums of the product itself, before the bias: of X's dtype, with the one
  /// rounding of the result.
  TensorView low_rank_rows = {};
  TensorView low_rank_weights = {};
  /// Forward and dX: a quantised W. `w` is then [E, N, K] of X's dtype, to which its values are
  /// decoded, with dense rows; its data are the packed values. The result has the bits of
  /// dequantise_weights followed by the same product. Where no kernel decodes the format, a pass
  /// before the product does (StepKind::kDequantise), which on a GPU needs context.memory.
  Quantization quantization = {};
  ScalesView w_scales = {};
  /// Forward and dX whose result stays in expert order: activated rows are all that is stored, half
  /// as many columns with a gate. Where no kernel applies it to its own results, a pass after the
  /// product does (StepKind::kActivate), which on a GPU needs context.memory.
  std::optional<Activation> activation;
};

/// Y_e = X_e W_e^T (+ low-rank part, + bias_e, activated).  x [T, K] with permute_x, else [M, K]; w
/// [E, N, K]; y [M, N], with permute_y [T * topk, N], or [M, N / 2] after a gated activation. Here
/// and below W may also be flattened to [E * N, K], and options.weight_layout may say that W and dW
/// are [E, K, N].
MOEGEMM_API Plan forward(const TensorView& x, const TensorView& w, const TensorView& y,
                         const RoutingView& routing, const GemmOptions& options = {},
                         const ExecutionContext& context = {});

/// dX_e = dY_e W_e (+ low-rank part, + bias_e, activated).  dy [M, N], or [T, N] with dy_per_token;
/// w [E, N, K]; dx [M, K], with permute_x [T * topk, K].
MOEGEMM_API Plan backward_dx(const TensorView& dy, const TensorView& w, const TensorView& dx,
                             const RoutingView& routing, const GemmOptions& options = {},
                             const ExecutionContext& context = {});

/// dW_e = dY_e^T X_e.  dy [M, N], or [T, N] with dy_per_token; x [T, K] with permute_x, else [M,
/// K]; dw [E, N, K].
MOEGEMM_API Plan backward_dw(const TensorView& dy, const TensorView& x, const TensorView& dw,
                             const RoutingView& routing, const GemmOptions& options = {},
                             const ExecutionContext& context = {});

}  // namespace moegemm
