#include <cstddef>
#include <exception>
#include <memory>
#include <utility>

#include "core/planning/planner.h"
#include "core/process/environment.h"
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

  Planned plan(const Problem& problem) const {
    return process_planner().plan(problem, backend, options.config, options.autotune);
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

Plan run_product(const Call& call, Planned planned, const RoutingView& routing,
                 const Wishes& wishes, const ExecutionContext& context) {
  const GemmOptions& options = wishes.options;
  if (options.autotune && context.tuning != nullptr &&
      planned.plan.source == PlanSource::kHeuristic) {
    planned = tune_unknown(call, options, context);
  }
  if (wishes.check) check_routing(call.problem, routing, context);
  planned.backend->launch(planned.plan, call.problem, call.operands, context);
  return std::move(planned.plan);
}

/// Memory for a copy of a permuted operand; null when the caller has none to spare: the copy only
/// saves time.
void* lent_copy(const ExecutionContext& context, std::int64_t bytes, Device device) {
  try {
    return context.memory->allocate(bytes, device);
  } catch (const std::exception&) {
    return nullptr;
  }
}

/// dW behind a copy of the permuted operand in the order of the segments.
Plan run_gathered_first(const Call& call, Planned planned, const RoutingView& routing,
                        const Wishes& wishes, const ExecutionContext& context) {
  const Problem& problem = call.problem;
  const bool gathers_x = problem.gathers_x();
  const std::int64_t columns = gathers_x ? problem.k : problem.n;
  void* copy =
      lent_copy(context, problem.rows * columns * size_bytes(problem.dtype), problem.device);
  if (copy == nullptr) {
    planned.plan.gathers_first = false;
    return run_product(call, std::move(planned), routing, wishes, context);
  }
  Call in_order = call;
  in_order.problem.presorted = true;
  in_order.problem.far_rows = false;
  in_order.problem.dy_per_token = false;
  const void*& source = gathers_x ? in_order.operands.x : in_order.operands.dy;
  std::int64_t& stride = gathers_x ? in_order.operands.x_stride : in_order.operands.dy_stride;
  const std::int64_t divisor = problem.gather_divisor();
  const auto matrix = [&](const void* data, std::int64_t rows, std::int64_t pitch) {
    return TensorView::matrix(const_cast<void*>(data), problem.dtype, rows, columns, pitch,
                              problem.device);
  };
  if (wishes.check) check_routing(problem, routing, context);
  kernels_for(problem.device)
      .gather_rows(matrix(source, problem.rows / divisor, stride), routing.gather_indices, divisor,
                   matrix(copy, problem.rows, columns), context);
  source = copy;
  stride = columns;
  Plan plan = run_product(in_order, wishes.plan(in_order.problem), routing, wishes, context);
  plan.gathers_first = true;
  return plan;
}

/// Memory for the product of a composed call; from the caller, who alone may own device memory.
class ProductMemory {
 public:
  ProductMemory(const Problem& product, const ExecutionContext& context) {
    const std::int64_t bytes = product.rows * product.features() * size_bytes(product.dtype);
    if (context.memory != nullptr) {
      data_ = context.memory->allocate(bytes, product.device);
    } else if (product.device.type == DeviceType::kCpu) {
      own_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes));
      data_ = own_.get();
    } else {
      refuse_value("context.memory is null; no kernel applies the activation of ",
                   to_string(product), " itself, so that the product needs ", bytes, " bytes");
    }
    if (data_ == nullptr && bytes > 0) {
      throw Error(ErrorKind::kRuntime, join("there is no memory for the ", bytes,
                                            " bytes of a product in front of its ", "activation"));
    }
  }
  void* data() const { return data_; }

 private:
  std::unique_ptr<std::byte[]> own_;
  void* data_ = nullptr;
};

/// The product without its bias, then one pass that adds it and activates: what a layer that keeps
/// the product for its backward does too, bit by bit.
Plan run_composed(const Call& call, const RoutingView& routing, const Wishes& wishes,
                  const ExecutionContext& context) {
  const Problem& problem = call.problem;
  Call product = composed_product(call);
  const std::int64_t columns = problem.features();
  const ProductMemory memory(product.problem, context);
  product.operands.out = memory.data();
  Plan plan = run_product(product, wishes.plan(product.problem), routing, wishes, context);
  plan.composed = true;

  const Operands& operands = call.operands;
  const auto matrix = [&](const void* data, DType dtype, std::int64_t rows, std::int64_t cols,
                          std::int64_t stride) {
    return TensorView::matrix(const_cast<void*>(data), dtype, rows, cols, stride, problem.device);
  };
  kernels_for(problem.device)
      .activate(matrix(memory.data(), problem.dtype, problem.rows, columns, columns),
                problem.bias ? matrix(operands.bias, problem.dtype, problem.experts, columns,
                                      operands.bias_stride)
                             : TensorView{},
                routing.m_sizes, *problem.activation,
                matrix(operands.out, problem.out_dtype, problem.rows, problem.output_columns(),
                       operands.out_stride),
                context);
  return plan;
}

Plan run(const Call& call, const RoutingView& routing, const GemmOptions& options,
         const ExecutionContext& context) {
  const Wishes wishes(options);
  Planned planned = wishes.plan(call.problem);
  if (planned.plan.composed) return run_composed(call, routing, wishes, context);
  if (planned.plan.gathers_first) {
    if (context.memory != nullptr) {
      return run_gathered_first(call, std::move(planned), routing, wishes, context);
    }
    planned.plan.gathers_first = false;
  }
  return run_product(call, std::move(planned), routing, wishes, context);
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
