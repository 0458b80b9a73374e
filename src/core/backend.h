#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/dropped_row.h"
#include "moegemm/info.h"
#include "moegemm/ops.h"
#include "moegemm/passes.h"
#include "moegemm/plan.h"
#include "moegemm/problem.h"

namespace moegemm {

/// The pointers of one validated call; the shapes are in its Problem. Strides are in elements,
/// between rows; the experts of W and dW are `n * stride` elements apart.
struct Operands {
  const void* x = nullptr;  ///< [T or M, K]; not for dX
  const void* w = nullptr;  ///< [E, N, K]; not for dW. Packed values of a quantised W, dense:
                            ///< expert e begins at byte e * Quantization::expert_bytes, its row n
                            ///< n * K values on
  const void* w_up = nullptr;      ///< the second half of N, as w; null unless Problem::ups_apart
  const void* w_scales = nullptr;  ///< of a quantised W, dense; else null
  const void* dy = nullptr;        ///< [M, N]; not for forward
  void* out = nullptr;             ///< Y [M, N], dX [M, K] or dW [E, N, K]
  std::int64_t x_stride = 0;
  std::int64_t w_stride = 0;
  std::int64_t dy_stride = 0;
  std::int64_t out_stride = 0;
  const void* m_sizes = nullptr;         ///< [E], Problem::sizes_dtype
  const void* starts = nullptr;          ///< [E], the same dtype; null unless Segments::kPlaced
  const void* gather_indices = nullptr;  ///< [M], Problem::index_dtype; null without permutation
  const void* router_weights = nullptr;  ///< [M], Problem::weights_dtype; null without multiply
  const void* bias = nullptr;            ///< [E, Problem::features()], dtype; null without bias
  std::int64_t bias_stride = 0;
  const void* low_rows = nullptr;     ///< [M, Problem::low_rank]; null without a low-rank part
  const void* low_weights = nullptr;  ///< W with a contraction of Problem::low_rank
  std::int64_t low_rows_stride = 0;
  std::int64_t low_weights_stride = 0;

  /// Its low-rank part as the operands of a product of its own, of low_rank_part(problem).
  Operands low_rank_part() const;
};

/// What the operands say about segments.
RoutingView segments_view(const Problem& problem, const Operands& operands);

/// The low-rank part as a product of its own, of rows in order: the same rows and features,
/// contracted over the rank.
Problem low_rank_part(const Problem& problem);

/// The part of every feasibility predicate that concerns W and the order of sums: a kernel reads
/// the format that KernelInfo::weights names. Empty if `kernel` can run `problem`, else the reason.
std::string refuse_weights(const Problem& problem, const KernelInfo& kernel);

/// One way to run the three products. A backend appears in the planner, in `moegemm info` and in
/// the conformance suite by being listed in registry.cpp. It never decides policy beyond its own
/// heuristic and never reads tensor memory while planning.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual BackendKind kind() const = 0;

  /// Empty if this backend can run on `device` at all, else the reason as a clause ("no CUDA
  /// device: ...").
  virtual std::string unavailable(Device device) const = 0;

  /// Every compiled kernel, in a fixed order: Step::kernel indexes it.
  virtual std::span<const KernelInfo> kernels() const = 0;

  /// The feasibility predicate, shared by heuristic, tuner and manual configs: empty if `kernel`
  /// runs `problem`, else the reason as a clause ("K = 7 is not a multiple of 8").
  virtual std::string refuse(const Problem& problem, const KernelInfo& kernel) const = 0;

  /// The product of `problem` with kernel number `kernel`, which must be feasible: grid, order of
  /// tiles and whatever else a launch has to be told.
  virtual Step plan_with(const Problem& problem, int kernel) const = 0;

  /// The kernel that should be fastest; at least one must be feasible. Host facts only, no
  /// allocation worth naming, a few microseconds.
  virtual int choose(const Problem& problem) const = 0;

  /// Whether applying the activation of `problem` in a kernel that can is faster than a pass after
  /// the product. May depend on the number of rows only where both give the same bits: a row's bits
  /// may not depend on the batch around it.
  virtual bool fusing_is_faster(const Problem&) const { return true; }

  /// Whether dW of `problem`, which permutes an operand, is faster when that operand's rows are
  /// first copied into order.
  virtual bool gathering_first_is_faster(const Problem&) const { return false; }

  /// Whether dW of `problem`, which multiplies rows by router weights, gets X scaled by a pass
  /// before it wherever there is memory for that, although some kernel might multiply itself. It
  /// decides which operand is rounded: all backends of a device give the same answer, so that it
  /// does not depend on which of them runs the product.
  virtual bool scales_first(const Problem&) const { return false; }

  /// Whether a quantised W of `problem` is decoded faster by a pass before a plain product than by
  /// the kernels that decode it themselves. Both have the same bits.
  virtual bool dequantising_first_is_faster(const Problem&) const { return false; }

  /// Whether a problem that is not aligned is faster on copies of its inputs that are. Both have
  /// the same bits.
  virtual bool aligning_first_is_faster(const Problem&) const { return false; }

  /// Whether a row GEMM zeroes what lies between segments; else a pass before it does.
  virtual bool fills_gaps() const { return true; }

  /// What the problem's device sustains, for predictions; empty: nothing is predicted.
  virtual MachineLimits limits(const Problem&) const { return {}; }

  /// Launches a product as its step says. Nothing is launched if this throws.
  virtual void launch(const Step& step, const Problem& problem, const Operands& operands,
                      const ExecutionContext& context) const = 0;
};

/// The first thing wrong with routing data, found by `check`.
struct RoutingFault {
  enum class What : std::uint8_t {
    kNegativeSize,
    kSizesExceedRows,
    kSegmentOutside,
    kSegmentsOverlap,
    kIndexOutOfRange,
    kDuplicateIndex
  } what;
  std::int64_t position = 0;  ///< expert or row
  std::int64_t value = 0;     ///< what was found there (kSizesExceedRows: the running sum;
                              ///< segments: where it begins)
  std::int64_t earlier = 0;   ///< kDuplicateIndex: the first row with that value; kSegmentOutside:
                              ///< where it ends; kSegmentsOverlap: the other expert
};

/// The same for data in host memory.
std::optional<RoutingFault> find_routing_fault(const RoutingView& routing, std::int64_t rows,
                                               std::int64_t flat_rows);

/// What the indices of an activation's backward are counted in: the flat rows that have a weight,
/// or as many as there are rows where none has.
inline std::int64_t flat_rows_of(const RoutingView& routing,
                                 const ActivationGradientOutputs& outputs, std::int64_t rows) {
  if (routing.router_weights.given()) return routing.router_weights.numel();
  return outputs.d_weights.given() ? outputs.d_weights.numel() : rows;
}

/// The memory-bound companions of the products, one implementation per device type, each pass
/// defined in a file of its own. Arguments are validated by the callers in core/passes/ and before
/// lowering.
class Passes {
 public:
  virtual ~Passes() = default;
#define MOEGEMM_PASS_IS = 0
#include "core/passes.inc"
};

}  // namespace moegemm
