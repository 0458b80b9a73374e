#include <utility>

#include "core/planning/planner.h"
#include "core/planning/stored_form.h"
#include "core/process/environment.h"
#include "core/refusal.h"
#include "core/registry.h"
#include "core/run.h"
#include "core/tuning/tune_call.h"
#include "core/validation/validate.h"
#include "core/workspace.h"
#include "moegemm/execution.h"
#include "moegemm/ops.h"

namespace moegemm {
namespace {

[[noreturn]] void raise(const RoutingFault& fault, const Problem& problem) {
  switch (fault.what) {
    case RoutingFault::What::kNegativeSize:
      refuse_value("m_sizes[", fault.position, "] is ", fault.value,
                   "; sizes must not be negative");
    case RoutingFault::What::kSizesExceedRows:
      refuse_value("m_sizes[0] to m_sizes[", fault.position, "] add up to ", fault.value,
                   "; there are only M = ", problem.rows, " rows");
    case RoutingFault::What::kSegmentOutside:
      refuse_value("the rows of expert ", fault.position, " are ", fault.value, " to ",
                   fault.earlier, "; they must be in [0, M) with M = ", problem.rows);
    case RoutingFault::What::kSegmentsOverlap:
      refuse_value("the rows of expert ", fault.position, " begin at ", fault.value,
                   ", inside those of expert ", fault.earlier, "; segments must not overlap");
    case RoutingFault::What::kIndexOutOfRange:
      refuse_value("gather_indices[", fault.position, "] is ", fault.value,
                   "; indices must be in [0, M) with M = ", problem.flat_rows());
    case RoutingFault::What::kDuplicateIndex:
      refuse_value("gather_indices[", fault.position, "] is ", fault.value, ", as gather_indices[",
                   fault.earlier, "] is; an index may stand at one position only");
  }
  refuse_value("the routing data is invalid");
}

/// m_sizes, and the indices if this problem reads them.
void check_routing(const Problem& problem, RoutingView routing, const ExecutionContext& context) {
  if (problem.permutation == Permutation::kNone) routing.gather_indices = {};
  const Passes* passes = passes_on(problem.device.type);
  if (const auto fault = passes->check(routing, problem.rows, problem.flat_rows(), context)) {
    raise(*fault, problem);
  }
}

/// A call's options and what the environment adds to them.
struct Wishes {
  explicit Wishes(const GemmOptions& of_call) : Wishes(of_call, environment_of_call()) {}

  Planned plan(const Problem& problem, WorkspaceUse workspace) const {
    return process_planner().plan(problem, backend, options.config, options.autotune, workspace);
  }

  const GemmOptions& options;
  std::optional<BackendKind> backend;
  bool check;

 private:
  Wishes(const GemmOptions& of_call, const CallEnvironment& environment)
      : options(of_call),
        backend(of_call.backend ? of_call.backend : environment.backend()),
        check(of_call.check || environment.check()) {}
};

}  // namespace

Plan run(const Description& description, const TensorView& first, const TensorView& second,
         const TensorView& out, const RoutingView& routing, const GemmOptions& options,
         const ExecutionContext& context) {
  Call call = in_stored_form(place(description, first, second, out, routing, options));
  take_context(call.problem, options, context);
  const Wishes wishes(options);
  const WorkspaceUse use = workspace_use(call.problem, context);
  Planned planned = wishes.plan(call.problem, use);
  if (options.autotune && context.tuning != nullptr &&
      planned.plan.source == PlanSource::kHeuristic) {
    planned = tune_unknown(call, options, context);
  }
  const Workspace workspace = borrow_workspace(planned, call.problem, context, [&] {
    return wishes.plan(call.problem, WorkspaceUse::kNeeded);
  });
  if (wishes.check) check_routing(call.problem, routing, context);
  run_steps(planned, call, workspace.data(), context);
  return std::move(planned.plan);
}

Plan forward(const TensorView& x, const TensorView& w, const TensorView& y,
             const RoutingView& routing, const GemmOptions& options,
             const ExecutionContext& context) {
  return run(described(Op::kForward, x, w, y, routing, options), x, w, y, routing, options,
             context);
}

Plan backward_dx(const TensorView& dy, const TensorView& w, const TensorView& dx,
                 const RoutingView& routing, const GemmOptions& options,
                 const ExecutionContext& context) {
  return run(described(Op::kDx, dy, w, dx, routing, options), dy, w, dx, routing, options, context);
}

Plan backward_dw(const TensorView& dy, const TensorView& x, const TensorView& dw,
                 const RoutingView& routing, const GemmOptions& options,
                 const ExecutionContext& context) {
  return run(described(Op::kDw, dy, x, dw, routing, options), dy, x, dw, routing, options, context);
}

Plan plan(const Problem& problem, const std::optional<BackendKind>& backend,
          const std::optional<KernelConfig>& config, bool may_use_workspace) {
  validate(problem);
  if (config) validate(*config, problem);
  Problem asked = in_stored_form(problem);
  asked.batch_invariant = asked.batch_invariant && is_batch_invariant();
  return plan_problem(asked, backend, config, false,
                      may_use_workspace ? WorkspaceUse::kFree : WorkspaceUse::kAvoid)
      .plan;
}

}  // namespace moegemm
