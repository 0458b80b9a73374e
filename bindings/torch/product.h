#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "arguments.h"
#include "moegemm/describe.h"
#include "packed_weight.h"

namespace moegemm::torch_ops {

/// What a product's `options` argument asks for: a text of words, so that neither side has numbers
/// to agree on. One text costs a call 0.1 us, a boolean for each word 0.6 us.
struct ProductOptions {
  GemmOptions gemm;
  bool float32_output = false;
  bool rows_pending = false;  ///< LaunchAhead::kWritesRows
  bool warn_at_once = false;
  Tails tails = Tails::kZero;
  std::int64_t expected_rows = -1;
};
ProductOptions read_options(const std::string& words);

/// Null for those that are not given.
struct ProductTensors {
  AtenTensorHandle first = nullptr;   ///< X (forward) or dY (dX, dW)
  AtenTensorHandle second = nullptr;  ///< W (forward, dX) or X (dW)
  AtenTensorHandle m_sizes = nullptr;
  AtenTensorHandle gather_indices = nullptr;
  AtenTensorHandle router_weights = nullptr;
  AtenTensorHandle bias = nullptr;
  AtenTensorHandle out = nullptr;
  AtenTensorHandle low_rank_rows = nullptr;
  AtenTensorHandle low_rank_weights = nullptr;
  AtenTensorHandle w_scales = nullptr;
  AtenTensorHandle w_up = nullptr;
};

/// One product of the operators, described from metadata alone: a refused call has allocated and
/// copied nothing.
class Product {
 public:
  /// `w_format` is empty or that of a quantised W: packed_weight.h.
  Product(Op op, const ProductTensors& tensors, std::int64_t topk, ProductOptions options,
          const std::string& w_format = {});

  /// Into a new tensor.
  Output run();
  /// Into `out`.
  void run_into_out() { run(out_.writable()); }
  /// The report as JSON.
  std::string tune(double budget_seconds, bool again);

 private:
  Output allocate_output() const;
  void run(const TensorView& out);
  RoutingView routing(const TensorView& m_sizes, const TensorView& gather_indices,
                      const TensorView& router_weights) const;
  RoutingView readable_routing();
  /// The second operand to read through; the scales of a quantised W go into the options.
  const TensorView& readable_second();
  /// Whether a copy of an operand is the launch ahead of the product.
  bool copied() const;

  Argument first_, second_, m_sizes_, gather_indices_, router_weights_, bias_, out_;
  Argument low_rank_rows_, low_rank_weights_, w_up_;
  std::unique_ptr<PackedWeight> packed_;  ///< in place of second_
  std::int64_t topk_;
  ProductOptions options_;
  Description description_;
};

}  // namespace moegemm::torch_ops
