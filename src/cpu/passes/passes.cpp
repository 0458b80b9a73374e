#include "core/registry.h"
#include "cpu/passes/activation.h"
#include "cpu/passes/compact.h"
#include "cpu/passes/expert_sums.h"
#include "cpu/passes/gather.h"
#include "cpu/passes/route.h"
#include "cpu/passes/scale.h"

namespace moegemm {
namespace {

class CpuPasses final : public Passes {
 public:
  void route(const TensorView& expert_ids, std::int64_t experts, const TensorView& m_sizes,
             const TensorView& gather_indices, const TensorView& inverse, void*,
             const ExecutionContext&) const override {
    cpu::passes::route(expert_ids, experts, m_sizes, gather_indices, inverse);
  }

  std::int64_t route_workspace_bytes(std::int64_t, std::int64_t) const override { return 0; }

  void route_compact(const TensorView& expert_ids, std::int64_t experts, const TensorView& m_sizes,
                     const TensorView& gather_indices, const TensorView& positions,
                     const RouteLimits& limits, void*, const ExecutionContext&) const override {
    cpu::passes::route_compact(expert_ids, experts, m_sizes, gather_indices, positions, limits);
  }

  std::optional<DroppedRow> dropped_row(const TensorView& expert_ids, std::int64_t experts,
                                        const TensorView& num_tokens, std::int64_t capacity,
                                        const ExecutionContext&) const override {
    return cpu::passes::dropped_row(expert_ids, experts, num_tokens, capacity);
  }

  void combine(const TensorView& rows, const TensorView& weights, const TensorView& positions,
               std::int64_t topk, const TensorView& out,
               const ExecutionContext& context) const override {
    cpu::passes::combine(rows, weights, positions, topk, out, context);
  }

  void activate(const TensorView& pre, const TensorView& bias, const TensorView& m_sizes,
                const Activation& activation, const TensorView& act,
                const ExecutionContext& context) const override {
    cpu::passes::activate(pre, bias, m_sizes, activation, act, context);
  }

  void activate_backward(const ActivationGradientInputs& inputs, const RoutingView& routing,
                         const Activation& activation, const ActivationGradientOutputs& outputs,
                         const ExecutionContext& context) const override {
    cpu::passes::activate_backward(inputs, routing, activation, outputs, context);
  }

  void expert_sums(const TensorView& rows, const RoutingView& routing, const TensorView& sums,
                   const ExecutionContext& context) const override {
    cpu::passes::expert_sums(rows, routing, sums, context);
  }

  void gather_rows(const TensorView& rows, const TensorView& gather_indices, std::int64_t divisor,
                   const TensorView& gathered, const ExecutionContext& context) const override {
    cpu::passes::gather_rows(rows, gather_indices, divisor, gathered, context);
  }

  void scale_rows(const TensorView& product, const TensorView& x, const RoutingView& routing,
                  const TensorView& scaled, const TensorView& dot, const TensorView& scaled_x,
                  const ExecutionContext& context) const override {
    cpu::passes::scale_rows(product, x, routing, scaled, dot, scaled_x, context);
  }

  std::optional<RoutingFault> check(const RoutingView& routing, std::int64_t rows,
                                    std::int64_t flat_rows,
                                    const ExecutionContext&) const override {
    return cpu::passes::check(routing, rows, flat_rows);
  }
};

}  // namespace

const Passes& cpu_passes() {
  static const CpuPasses kernels;
  return kernels;
}

}  // namespace moegemm
