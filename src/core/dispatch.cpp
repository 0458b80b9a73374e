#include <utility>

#include "core/planning/planner.h"
#include "core/planning/stored_form.h"
#include "core/process/environment.h"
#include "core/run.h"
#include "core/tuning/tune_call.h"
#include "core/validation/routing_data.h"
#include "core/validation/validate.h"
#include "core/workspace.h"
#include "moegemm/ops.h"

namespace moegemm {
namespace {

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
  if (call.problem.device.type == DeviceType::kMeta) return {};
  take_context(call.problem, options, context);
  const Wishes wishes(options);
  if (wishes.check) check_routing(call.problem, routing, context);
  const WorkspaceUse use = workspace_use(call.problem, context);
  Planned planned = wishes.plan(call.problem, use);
  if (options.autotune && context.tuning != nullptr &&
      planned.plan.source == PlanSource::kHeuristic) {
    planned = tune_unknown(call, options, context);
  }
  const Workspace workspace = borrow_workspace(planned, call.problem, context, [&] {
    return wishes.plan(call.problem, WorkspaceUse::kNeeded);
  });
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
  const WorkspaceUse workspace = may_use_workspace ? WorkspaceUse::kFree : WorkspaceUse::kAvoid;
  return plan_problem(asked_by_hand(problem, config), backend, config, false, workspace).plan;
}

}  // namespace moegemm
