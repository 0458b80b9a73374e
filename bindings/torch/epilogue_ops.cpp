#include <optional>
#include <vector>

#include "gemm_rules.h"
#include "operators.h"
#include "runtime/execution.h"
#include "runtime/torch_memory.h"
#include "runtime/torch_tuning.h"

namespace moegemm::torch_ops {
namespace {

/// W as [E, K, N] makes Y = X W the library's dX with X in the place of dY; what permute_x and
/// permute_y say of X and Y holds of dY and dX the other way round.
std::int64_t flags_for(bool transposed, std::int64_t flags) {
  if (!transposed) return flags;
  if ((flags & kFuseMul) != 0) {
    refuse_value("fuse_mul_post is True with a transposed W; only W as [E, N, K] multiplies");
  }
  constexpr std::int64_t kOrder = kPermuteX | kPermuteY;
  const std::int64_t others = flags & ~(kOrder | kTransposed);
  if ((flags & kOrder) == kPermuteX) return others | kPermuteY | kDyPerToken;
  return others | ((flags & kOrder) == kPermuteY ? kPermuteX : flags & kOrder);
}

Tensor run(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
           const std::optional<Activation>& activation, const Tensor& m_sizes,
           const std::optional<Tensor>& gather_indices, const std::optional<Tensor>& topk_weights,
           std::int64_t topk, std::int64_t flags) {
  const bool transposed = (flags & kTransposed) != 0;
  const Op op = transposed ? Op::kDx : Op::kForward;
  GemmArguments arguments(op, x, w, m_sizes, gather_indices, topk_weights, topk,
                          flags_for(transposed, flags));
  const GemmShape& shape = arguments.shape();
  const std::int64_t features = transposed ? shape.k : shape.n;
  Argument biases("bias", bias);
  if (biases.given()) {
    biases.require_rank(2, "[E, columns of X W^T]");
    biases.require_same_dtype(arguments.first);
    biases.require_same_device(arguments.first);
    arguments.options.bias = biases.readable();
  }
  arguments.options.activation = activation;
  const RoutingView routing = arguments.routing.readable();
  const TensorView first = arguments.first.readable(), second = arguments.second.readable();
  const Execution execution(arguments.device(), shape.flops());
  const std::int64_t columns = activation ? activation->activated_columns(features) : features;
  Output out = allocate({shape.rows, columns}, arguments.output_dtype(), arguments.device());
  TorchMemory memory;
  TorchTuning tuning;
  ExecutionContext context =
      arguments.options.autotune ? tuning.context(execution) : execution.context();
  context.memory = &memory;
  (transposed ? &backward_dx : &moegemm::forward)(first, second, out.view, routing,
                                                  arguments.options, context);
  return out.hand_over();
}

}  // namespace

Tensor forward_activated(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                         const Tensor& m_sizes, const std::optional<Tensor>& gather_indices,
                         std::int64_t topk, std::int64_t flags, const std::string& activation) {
  return raising([&] {
    return run(x, w, bias, parse_activation(activation), m_sizes, gather_indices, std::nullopt,
               topk, flags);
  });
}

Tensor forward_biased(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& m_sizes,
                      const std::optional<Tensor>& gather_indices,
                      const std::optional<Tensor>& topk_weights, std::int64_t topk,
                      std::int64_t flags) {
  return raising([&] {
    return run(x, w, bias, std::nullopt, m_sizes, gather_indices, topk_weights, topk, flags);
  });
}

}  // namespace moegemm::torch_ops
