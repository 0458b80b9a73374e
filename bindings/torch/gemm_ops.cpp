#include <torch/csrc/stable/stableivalue_conversions.h>

#include <optional>
#include <vector>

#include "gemm_rules.h"
#include "operators.h"
#include "runtime/execution.h"
#include "runtime/torch_memory.h"
#include "runtime/torch_tuning.h"

namespace moegemm::torch_ops {
namespace {

/// A kernel asked for by hand, as a list of seven: rows, columns, depth, stages, then TMA for the
/// row operand, the weight operand and the store (1 asked for, 0 not asked for).
void read_config(const Config& numbers, GemmOptions& options) {
  if (!numbers) return;
  if (numbers->size() != 7) {
    refuse_value("config has ", numbers->size(), " numbers; it must have 7");
  }
  const auto asked = [&](int i) {
    return (*numbers)[i] != 0 ? std::optional<bool>(true) : std::nullopt;
  };
  KernelConfig config;
  config.block_rows = static_cast<int>((*numbers)[0]);
  config.block_cols = static_cast<int>((*numbers)[1]);
  config.block_depth = static_cast<int>((*numbers)[2]);
  config.stages = static_cast<int>((*numbers)[3]);
  config.tma_load_rows = asked(4);
  config.tma_load_weights = asked(5);
  config.tma_store = asked(6);
  options.config = config;
}

void run(Op op, GemmArguments& arguments, const TensorView& out) {
  const RoutingView routing = arguments.routing.readable();
  const TensorView first = arguments.first.readable();
  const TensorView second = arguments.second.readable();
  const Execution execution(arguments.device(), arguments.shape().flops());
  const auto library_call = op == Op::kForward ? &moegemm::forward
                            : op == Op::kDx    ? &backward_dx
                                               : &backward_dw;
  TorchMemory memory;
  const auto call = [&](ExecutionContext context) {
    context.memory = &memory;
    return library_call(first, second, out, routing, arguments.options, context);
  };
  const Plan plan = arguments.options.autotune ? call(TorchTuning().context(execution))
                                               : call(execution.context());
  if (!plan.note.empty()) note_once(plan.note, arguments.warn_at_once());
}

Output allocate_result(Op op, const GemmArguments& arguments) {
  const GemmShape& shape = arguments.shape();
  const DType dtype = arguments.output_dtype();
  const Device device = arguments.device();
  switch (op) {
    case Op::kForward:
      return allocate({shape.rows, shape.n}, dtype, device);
    case Op::kDx:
      return allocate({shape.rows, shape.k}, dtype, device);
    case Op::kDw:
      break;
  }
  return allocate({shape.experts, shape.n, shape.k}, dtype, device);
}

template <Op op>
Tensor product(const Tensor& first, const Tensor& second, const Tensor& m_sizes,
               const std::optional<Tensor>& gather_indices,
               const std::optional<Tensor>& topk_weights, std::int64_t topk, std::int64_t flags,
               const Config& config) {
  return raising([&] {
    GemmArguments arguments(op, first, second, m_sizes, gather_indices, topk_weights, topk, flags);
    if (arguments.options.accumulate) {
      refuse_value("accumulate is True without out; there is nothing to add to");
    }
    read_config(config, arguments.options);
    Output result = allocate_result(op, arguments);
    run(op, arguments, result.view);
    return result.hand_over();
  });
}

template <Op op>
void product_out(const Tensor& first, const Tensor& second, const Tensor& m_sizes,
                 const std::optional<Tensor>& gather_indices,
                 const std::optional<Tensor>& topk_weights, std::int64_t topk, std::int64_t flags,
                 const Config& config, const Tensor& out) {
  raising([&] {
    GemmArguments arguments(op, first, second, m_sizes, gather_indices, topk_weights, topk, flags);
    read_config(config, arguments.options);
    Argument output("out", out);
    arguments.check_output(output);
    run(op, arguments, output.writable());
  });
}

}  // namespace

Tensor forward(const Tensor& x, const Tensor& w, const Tensor& m_sizes,
               const std::optional<Tensor>& gather_indices,
               const std::optional<Tensor>& topk_weights, std::int64_t topk, std::int64_t flags,
               const Config& config) {
  return product<Op::kForward>(x, w, m_sizes, gather_indices, topk_weights, topk, flags, config);
}

void forward_plain(StableIValue* stack, std::uint64_t /*inputs*/, std::uint64_t /*outputs*/) {
  const auto take = [&](int i) {
    return OwnTensor(torch::stable::detail::to<AtenTensorHandle>(stack[i]));
  };
  const OwnTensor x = take(0);
  const OwnTensor w = take(1);
  const OwnTensor m_sizes = take(2);
  stack[0] = raising([&] {
    GemmArguments arguments(Op::kForward, x.get(), w.get(), m_sizes.get(), nullptr, nullptr, 1, 0);
    Output result = allocate_result(Op::kForward, arguments);
    run(Op::kForward, arguments, result.view);
    return torch::stable::detail::from(result.own.release());
  });
}

Tensor dx(const Tensor& dy, const Tensor& w, const Tensor& m_sizes,
          const std::optional<Tensor>& gather_indices, const std::optional<Tensor>& topk_weights,
          std::int64_t topk, std::int64_t flags, const Config& config) {
  return product<Op::kDx>(dy, w, m_sizes, gather_indices, topk_weights, topk, flags, config);
}

Tensor dw(const Tensor& dy, const Tensor& x, const Tensor& m_sizes,
          const std::optional<Tensor>& gather_indices, const std::optional<Tensor>& topk_weights,
          std::int64_t topk, std::int64_t flags, const Config& config) {
  return product<Op::kDw>(dy, x, m_sizes, gather_indices, topk_weights, topk, flags, config);
}

void forward_out(const Tensor& x, const Tensor& w, const Tensor& m_sizes,
                 const std::optional<Tensor>& gather_indices,
                 const std::optional<Tensor>& topk_weights, std::int64_t topk, std::int64_t flags,
                 const Config& config, const Tensor& out) {
  product_out<Op::kForward>(x, w, m_sizes, gather_indices, topk_weights, topk, flags, config, out);
}

void dx_out(const Tensor& dy, const Tensor& w, const Tensor& m_sizes,
            const std::optional<Tensor>& gather_indices, const std::optional<Tensor>& topk_weights,
            std::int64_t topk, std::int64_t flags, const Config& config, const Tensor& out) {
  product_out<Op::kDx>(dy, w, m_sizes, gather_indices, topk_weights, topk, flags, config, out);
}

void dw_out(const Tensor& dy, const Tensor& x, const Tensor& m_sizes,
            const std::optional<Tensor>& gather_indices, const std::optional<Tensor>& topk_weights,
            std::int64_t topk, std::int64_t flags, const Config& config, const Tensor& out) {
  product_out<Op::kDw>(dy, x, m_sizes, gather_indices, topk_weights, topk, flags, config, out);
}

std::string tune(std::int64_t op_number, const Tensor& first, const Tensor& second,
                 const Tensor& m_sizes, const std::optional<Tensor>& gather_indices,
                 const std::optional<Tensor>& topk_weights, std::int64_t topk, std::int64_t flags,
                 double budget_seconds, bool again) {
  return raising([&] {
    if (op_number < 0 || op_number > 2) refuse_value("op is ", op_number, "; it must be 0, 1 or 2");
    const Op op = static_cast<Op>(op_number);
    GemmArguments arguments(op, first, second, m_sizes, gather_indices, topk_weights, topk, flags);
    const Output result = allocate_result(op, arguments);
    const RoutingView routing = arguments.routing.readable();
    const TensorView first_view = arguments.first.readable();
    const TensorView second_view = arguments.second.readable();
    const Execution execution(arguments.device(), arguments.shape().flops());
    TorchTuning tuning;
    tuning.budget_seconds = budget_seconds;
    TorchMemory memory;  // the calls will have it, so that plans may use it
    ExecutionContext context = tuning.context(execution);
    context.memory = &memory;
    const auto measure = op == Op::kForward ? &tune_forward : op == Op::kDx ? &tune_dx : &tune_dw;
    return describe(
        measure(first_view, second_view, result.view, routing, arguments.options, context, again));
  });
}

}  // namespace moegemm::torch_ops
