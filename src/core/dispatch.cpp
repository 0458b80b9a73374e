#include <utility>

#include "core/environment.h"
#include "core/planner.h"
#include "core/refusal.h"
#include "core/registry.h"
#include "core/tuning/tune_call.h"
#include "core/validation/validate.h"
#include "moegemm/ops.h"

namespace moegemm {
namespace {

[[noreturn]] void raise(const RoutingFault& fault, std::int64_t rows) {
  switch (fault.what) {
    case RoutingFault::What::kNegativeSize:
      refuse_value("m_sizes[", fault.position, "] is ", fault.value,
                   "; sizes must not be negative");
    case RoutingFault::What::kSizesExceedRows:
      refuse_value("m_sizes[0] to m_sizes[", fault.position, "] add up to ", fault.value,
                   "; there are only M = ", rows, " rows");
    case RoutingFault::What::kIndexOutOfRange:
      refuse_value("gather_indices[", fault.position, "] is ", fault.value,
                   "; indices must be in [0, M) with M = ", rows);
  }
  refuse_value("the routing data is invalid");
}

/// m_sizes, and the indices if this problem reads them.
void check_routing(const Problem& problem, RoutingView routing, const ExecutionContext& context) {
  if (problem.permutation == Permutation::kNone) routing.gather_indices = {};
  const RowKernels* kernels = row_kernels(problem.device.type);
  if (const auto fault = kernels->check(routing, problem.rows, context)) {
    raise(*fault, problem.rows);
  }
}

Plan run(const Call& call, const RoutingView& routing, const GemmOptions& options,
         const ExecutionContext& context) {
  Planned planned = plan_problem(call.problem, options.backend, options.config, options.autotune);
  if (options.autotune && context.tuning != nullptr &&
      planned.plan.source == PlanSource::kHeuristic) {
    planned = tune_unknown(call, options, context);
  }
  if (options.check || environment_check()) check_routing(call.problem, routing, context);
  planned.backend->launch(planned.plan, call.problem, call.operands, context);
  return std::move(planned.plan);
}

}  // namespace

Plan forward(const TensorView& x, const TensorView& w, const TensorView& y,
             const RoutingView& routing, const GemmOptions& options,
             const ExecutionContext& context) {
  return run(describe_forward(x, w, y, routing, options), routing, options, context);
}

Plan backward_dx(const TensorView& dy, const TensorView& w, const TensorView& dx,
                 const RoutingView& routing, const GemmOptions& options,
                 const ExecutionContext& context) {
  return run(describe_dx(dy, w, dx, routing, options), routing, options, context);
}

Plan backward_dw(const TensorView& dy, const TensorView& x, const TensorView& dw,
                 const RoutingView& routing, const GemmOptions& options,
                 const ExecutionContext& context) {
  return run(describe_dw(dy, x, dw, routing, options), routing, options, context);
}

Plan plan(const Problem& problem, const std::optional<BackendKind>& backend,
          const std::optional<KernelConfig>& config) {
  validate(problem);
  if (config) validate(*config, problem);
  return plan_problem(problem, backend, config).plan;
}

}  // namespace moegemm
