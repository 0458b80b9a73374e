#include <cstddef>
#include <exception>
#include <memory>
#include <utility>

#include "core/planning/planner.h"
#include "core/process/environment.h"
#include "core/refusal.h"
#include "core/registry.h"
#include "core/run.h"
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
    case RoutingFault::What::kDuplicateIndex:
      refuse_value("gather_indices[", fault.position, "] is ", fault.value, ", as gather_indices[",
                   fault.earlier, "] is; an index may stand at one position only");
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

/// The memory of a plan while it is launched: lent by the caller, who alone may own device memory,
/// or for tensors on the CPU from the heap.
class Workspace {
 public:
  /// Throws where there is none, in the words of whoever has none.
  Workspace(const Planned& planned, const Problem& problem, const ExecutionContext& context) {
    const std::int64_t bytes = planned.plan.workspace_bytes;
    if (bytes == 0) return;
    if (context.memory != nullptr) {
      data_ = static_cast<std::byte*>(context.memory->allocate(bytes, problem.device));
    } else if (problem.device.type == DeviceType::kCpu) {
      own_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes));
      data_ = own_.get();
    } else {
      refuse_value("context.memory is null; ", to_string(problem), " needs ", bytes,
                   " bytes of workspace: ", to_string(planned.plan));
    }
    if (data_ == nullptr) {
      throw Error(ErrorKind::kRuntime, join("there is no memory for the ", bytes,
                                            " bytes of workspace of ", to_string(planned.plan)));
    }
  }
  std::byte* data() const { return data_; }

 private:
  std::unique_ptr<std::byte[]> own_;
  std::byte* data_ = nullptr;
};

/// A plan's memory, or the plan that does with less of it where there is not enough: what only
/// saves time is left out, and the bits stay the same.
Workspace borrow(Planned& planned, const Call& call, const Wishes& wishes,
                 const ExecutionContext& context) {
  try {
    return Workspace(planned, call.problem, context);
  } catch (const std::exception&) {
    Planned smaller = wishes.plan(call.problem, WorkspaceUse::kNeeded);
    if (smaller.plan.workspace_bytes >= planned.plan.workspace_bytes) throw;
    planned = std::move(smaller);
  }
  return Workspace(planned, call.problem, context);
}

Plan run(const Call& call, const RoutingView& routing, const GemmOptions& options,
         const ExecutionContext& context) {
  const Wishes wishes(options);
  const WorkspaceUse use = workspace_use(call.problem, context);
  Planned planned = wishes.plan(call.problem, use);
  if (options.autotune && context.tuning != nullptr &&
      planned.plan.source == PlanSource::kHeuristic) {
    planned = tune_unknown(call, options, context);
  }
  const Workspace workspace = borrow(planned, call, wishes, context);
  if (wishes.check) check_routing(call.problem, routing, context);
  run_steps(planned, call, workspace.data(), context);
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
          const std::optional<KernelConfig>& config, bool may_use_workspace) {
  validate(problem);
  if (config) validate(*config, problem);
  return plan_problem(problem, backend, config, false,
                      may_use_workspace ? WorkspaceUse::kFree : WorkspaceUse::kAvoid)
      .plan;
}

}  // namespace moegemm
