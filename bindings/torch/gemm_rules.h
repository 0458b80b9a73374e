#pragma once

#include <cstdint>

#include "arguments.h"
#include "moegemm/ops.h"

namespace moegemm::torch_ops {

/// Bits of the operators' `flags` argument; python/moegemm/operators/flags.py has the same list.
enum Flag : std::int64_t {
  kPermuteX = 1,
  kPermuteY = 2,
  kFuseMul = 4,
  kAllowTf32 = 8,
  kCheck = 16,
  kAccumulate = 32,
  kFloat32Output = 64,
  kWarnAtOnce = 128,
  kDyPerToken = 256,
  kAutotune = 512,
  kTransposed = 1024,  ///< forward_activated and forward_biased: W is [E, K, N]
};

/// The extents of one product, once its arguments have passed the rules.
struct GemmShape {
  std::int64_t experts = 0;  ///< E
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t rows = 0;  ///< M

  double flops() const {
    return 2.0 * static_cast<double>(rows) * static_cast<double>(n) * static_cast<double>(k);
  }
};

/// The tensors that say which row belongs to which expert.
struct RoutingArguments {
  Argument m_sizes;
  Argument gather_indices;
  Argument topk_weights;
  std::int64_t topk = 1;

  RoutingView readable();
};

/// The arguments of one product. Shapes, dtypes and devices are checked from metadata alone, so
/// that a refused call has allocated and copied nothing.
class GemmArguments {
 public:
  /// Null for indices and weights that are not given.
  GemmArguments(Op op, AtenTensorHandle first, AtenTensorHandle second, AtenTensorHandle m_sizes,
                AtenTensorHandle gather_indices, AtenTensorHandle topk_weights, std::int64_t topk,
                std::int64_t flags);
  GemmArguments(Op op, const Tensor& first_tensor, const Tensor& second_tensor,
                const Tensor& m_sizes, const std::optional<Tensor>& gather_indices,
                const std::optional<Tensor>& topk_weights, std::int64_t topk, std::int64_t flags)
      : GemmArguments(op, first_tensor.get(), second_tensor.get(), m_sizes.get(),
                      handle_of(gather_indices), handle_of(topk_weights), topk, flags) {}

  const GemmShape& shape() const { return shape_; }
  Device device() const { return first.device(); }
  DType output_dtype() const { return float32_output_ ? DType::kFloat32 : first.dtype(); }
  bool warn_at_once() const { return warn_at_once_; }
  void check_output(const Argument& output) const;

  Argument first;   ///< X (forward) or dY (dX, dW)
  Argument second;  ///< W (forward, dX) or X (dW)
  RoutingArguments routing;
  GemmOptions options;

 private:
  void check_routing(bool first_has_tokens);
  void check_weights();
  void check_x_rows(const Argument& x) const;

  Op op_;
  bool float32_output_ = false;
  bool warn_at_once_ = false;
  GemmShape shape_;
};

}  // namespace moegemm::torch_ops
