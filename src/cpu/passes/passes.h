#pragma once

#include "core/backend.h"

namespace moegemm::cpu {

/// The memory-bound operations on the CPU, each defined in a file of its own. Arguments are
/// validated by the callers.
class CpuPasses final : public Passes {
 public:
  void route(const TensorView& expert_ids, std::int64_t experts, const TensorView& m_sizes,
             const TensorView& gather_indices, const TensorView& inverse, void* workspace,
             const ExecutionContext& context) const override;
  std::int64_t route_workspace_bytes(std::int64_t, std::int64_t) const override { return 0; }
  void route_compact(const TensorView& expert_ids, std::int64_t experts, const TensorView& m_sizes,
                     const TensorView& gather_indices, const TensorView& positions,
                     const RouteLimits& limits, void* workspace,
                     const ExecutionContext& context) const override;
  std::optional<DroppedRow> dropped_row(const TensorView& expert_ids, std::int64_t experts,
                                        const TensorView& num_tokens, std::int64_t capacity,
                                        const ExecutionContext& context) const override;
  void combine(const TensorView& rows, const TensorView& weights, const TensorView& positions,
               std::int64_t topk, const TensorView& out,
               const ExecutionContext& context) const override;
  void activate(const TensorView& pre, const TensorView& bias, const RoutingView& routing,
                const Activation& activation, const TensorView& act,
                const ExecutionContext& context) const override;
  void activate_backward(const ActivationGradientInputs& inputs, const RoutingView& routing,
                         const Activation& activation, const ActivationGradientOutputs& outputs,
                         const ExecutionContext& context) const override;
  void expert_sums(const TensorView& rows, const RoutingView& routing, const TensorView& sums,
                   const ExecutionContext& context) const override;
  void add_weighted_bias(const TensorView& rows, const TensorView& bias, const RoutingView& routing,
                         const TensorView& out, const ExecutionContext& context) const override;
  void gather_rows(const TensorView& rows, const TensorView& gather_indices, std::int64_t divisor,
                   const TensorView& gathered, const ExecutionContext& context) const override;
  void scale_rows(const TensorView& product, const TensorView& x, const RoutingView& routing,
                  const TensorView& scaled, const TensorView& dot, const TensorView& scaled_x,
                  const ExecutionContext& context) const override;
  std::optional<RoutingFault> check(const RoutingView& routing, std::int64_t rows,
                                    std::int64_t flat_rows,
                                    const ExecutionContext& context) const override;
};

}  // namespace moegemm::cpu
