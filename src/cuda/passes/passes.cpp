#include <cuda_runtime_api.h>

#include "core/backend.h"
#include "core/registry.h"
#include "cuda/host/device_facts.h"
#include "cuda/passes/activation/activation.h"
#include "cuda/passes/combine.h"
#include "cuda/passes/expert_sums.h"
#include "cuda/passes/gather_rows.h"
#include "cuda/passes/routing/check_routing.h"
#include "cuda/passes/routing/route.h"
#include "cuda/passes/routing/route_plan.h"
#include "cuda/passes/scale_rows.h"

namespace moegemm {
namespace {

cudaStream_t stream_of(const ExecutionContext& context) {
  return static_cast<cudaStream_t>(context.stream);
}

class CudaPasses final : public Passes {
 public:
  void route(const TensorView& expert_ids, std::int64_t experts, const TensorView& m_sizes,
             const TensorView& gather_indices, const TensorView& inverse, void* workspace,
             const ExecutionContext& context) const override {
    const cuda::DeviceGuard guard(expert_ids.device.index);
    cuda::launch_route(expert_ids, experts, m_sizes, gather_indices, inverse, workspace,
                       stream_of(context));
  }

  std::int64_t route_workspace_bytes(std::int64_t rows, std::int64_t experts) const override {
    return cuda::plan_route(rows, experts).workspace_bytes();
  }

  void route_compact(const TensorView& expert_ids, std::int64_t experts, const TensorView& m_sizes,
                     const TensorView& gather_indices, const TensorView& positions,
                     const RouteLimits& limits, void* workspace,
                     const ExecutionContext& context) const override {
    const cuda::DeviceGuard guard(expert_ids.device.index);
    cuda::launch_route_compact(expert_ids, experts, m_sizes, gather_indices, positions, limits,
                               workspace, stream_of(context));
  }

  std::optional<DroppedRow> dropped_row(const TensorView& expert_ids, std::int64_t experts,
                                        const TensorView& num_tokens, std::int64_t capacity,
                                        const ExecutionContext& context) const override {
    const cuda::DeviceGuard guard(expert_ids.device.index);
    return cuda::find_dropped_row_on_device(expert_ids, experts, num_tokens, capacity,
                                            stream_of(context));
  }

  void combine(const TensorView& rows, const TensorView& weights, const TensorView& positions,
               std::int64_t topk, const TensorView& out,
               const ExecutionContext& context) const override {
    const cuda::DeviceGuard guard(rows.device.index);
    cuda::launch_combine(rows, weights, positions, topk, out, stream_of(context));
  }

  void activate(const TensorView& pre, const TensorView& bias, const TensorView& m_sizes,
                const Activation& activation, const TensorView& act,
                const ExecutionContext& context) const override {
    const cuda::DeviceGuard guard(pre.device.index);
    cuda::launch_activate(pre, bias, m_sizes, activation, act, stream_of(context));
  }

  void activate_backward(const ActivationGradientInputs& inputs, const RoutingView& routing,
                         const Activation& activation, const ActivationGradientOutputs& outputs,
                         const ExecutionContext& context) const override {
    const cuda::DeviceGuard guard(inputs.pre.device.index);
    cuda::launch_activate_backward(inputs, routing, activation, outputs, stream_of(context));
  }

  void expert_sums(const TensorView& rows, const RoutingView& routing, const TensorView& sums,
                   const ExecutionContext& context) const override {
    const cuda::DeviceGuard guard(rows.device.index);
    cuda::launch_expert_sums(rows, routing, sums, stream_of(context));
  }

  void gather_rows(const TensorView& rows, const TensorView& gather_indices, std::int64_t divisor,
                   const TensorView& gathered, const ExecutionContext& context) const override {
    const cuda::DeviceGuard guard(rows.device.index);
    cuda::launch_gather_rows(rows, gather_indices, divisor, gathered, stream_of(context));
  }

  void scale_rows(const TensorView& product, const TensorView& x, const RoutingView& routing,
                  const TensorView& scaled, const TensorView& dot, const TensorView& scaled_x,
                  const ExecutionContext& context) const override {
    const cuda::DeviceGuard guard(product.device.index);
    cuda::launch_scale_rows(product, x, routing, scaled, dot, scaled_x, stream_of(context));
  }

  std::optional<RoutingFault> check(const RoutingView& routing, std::int64_t rows,
                                    std::int64_t flat_rows,
                                    const ExecutionContext& context) const override {
    const cuda::DeviceGuard guard(routing.m_sizes.device.index);
    return cuda::check_routing(routing, rows, flat_rows, stream_of(context));
  }
};

}  // namespace

const Passes& cuda_passes() {
  static const CudaPasses kernels;
  return kernels;
}

}  // namespace moegemm
