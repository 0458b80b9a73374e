#include "core/registry.h"
#include "cpu/rows/activation.h"
#include "cpu/rows/expert_sums.h"
#include "cpu/rows/gather.h"
#include "cpu/rows/route.h"
#include "cpu/rows/scale.h"

namespace moegemm {
namespace {

class CpuRowKernels final : public RowKernels {
 public:
  void route(const TensorView& expert_ids, std::int64_t experts, const TensorView& m_sizes,
             const TensorView& gather_indices, const TensorView& inverse, void*,
             const ExecutionContext&) const override {
    cpu::rows::route(expert_ids, experts, m_sizes, gather_indices, inverse);
  }

  std::int64_t route_workspace_bytes(std::int64_t, std::int64_t) const override { return 0; }

  void combine(const TensorView& rows, const TensorView& weights, std::int64_t topk,
               const TensorView& out, const ExecutionContext& context) const override {
    cpu::rows::combine(rows, weights, topk, out, context);
  }

  void activate(const TensorView& pre, const TensorView& bias, const TensorView& m_sizes,
                const Activation& activation, const TensorView& act,
                const ExecutionContext& context) const override {
    cpu::rows::activate(pre, bias, m_sizes, activation, act, context);
  }

  void activate_backward(const ActivationGradientInputs& inputs, const RoutingView& routing,
                         const Activation& activation, const ActivationGradientOutputs& outputs,
                         const ExecutionContext& context) const override {
    cpu::rows::activate_backward(inputs, routing, activation, outputs, context);
  }

  void expert_sums(const TensorView& rows, const RoutingView& routing, const TensorView& sums,
                   const ExecutionContext& context) const override {
    cpu::rows::expert_sums(rows, routing, sums, context);
  }

  void gather_rows(const TensorView& rows, const TensorView& gather_indices, std::int64_t divisor,
                   const TensorView& gathered, const ExecutionContext& context) const override {
    cpu::rows::gather_rows(rows, gather_indices, divisor, gathered, context);
  }

  void scale_rows(const TensorView& product, const TensorView& x, const RoutingView& routing,
                  const TensorView& scaled, const TensorView& dot, const TensorView& scaled_x,
                  const ExecutionContext& context) const override {
    cpu::rows::scale_rows(product, x, routing, scaled, dot, scaled_x, context);
  }

  std::optional<RoutingFault> check(const RoutingView& routing, std::int64_t rows,
                                    const ExecutionContext&) const override {
    return cpu::rows::check(routing, rows);
  }
};

}  // namespace

const RowKernels& cpu_row_kernels() {
  static const CpuRowKernels kernels;
  return kernels;
}

}  // namespace moegemm
