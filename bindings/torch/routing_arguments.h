#pragma once

#include <optional>
#include <string>

#include "arguments.h"
#include "moegemm/ops.h"
#include "product.h"

namespace moegemm::torch_ops {

/// An operator's `m_sizes` in a RoutingView: [E] sizes, [2, E] sizes and starts, or [1, E]
/// cumulative ends. One argument says it all, so that no operator has arguments for layouts that
/// few use.
inline RoutingView with_segments(const TensorView& m_sizes, RoutingView routing) {
  routing.m_sizes = m_sizes;
  if (m_sizes.rank != 2) return routing;
  if (m_sizes.shape[0] < 1 || m_sizes.shape[0] > 2) {
    refuse_value("m_sizes is ", to_string(m_sizes),
                 "; its shape must be [E], [2, E] (sizes and starts) or [1, E] (ends)");
  }
  const auto row = [&](std::int64_t i) {
    auto* data = static_cast<char*>(m_sizes.data);
    const std::int64_t offset = i * m_sizes.row_stride * size_bytes(m_sizes.dtype);
    return TensorView::vector(data == nullptr ? nullptr : data + offset, m_sizes.dtype,
                              m_sizes.shape[1], m_sizes.device);
  };
  routing.m_sizes = row(0);
  routing.ends = m_sizes.shape[0] == 1;
  if (!routing.ends) routing.starts = row(1);
  return routing;
}

/// The tensors that say which row belongs to which expert, of a pass.
class RoutingArguments {
 public:
  RoutingArguments(const Tensor& m_sizes, const std::optional<Tensor>& gather_indices,
                   const std::optional<Tensor>& router_weights, std::int64_t topk)
      : m_sizes_("m_sizes", m_sizes),
        gather_indices_("gather_indices", gather_indices),
        router_weights_("router_weights", router_weights),
        topk_(topk) {}

  /// `words` are those of a product's options that say what is outside the segments, if any.
  RoutingView readable(const std::string& words = "") {
    RoutingView routing{{}, gather_indices_.readable(), router_weights_.readable_dense(), topk_};
    const ProductOptions options = read_options(words);
    routing.tails = options.tails;
    routing.expected_rows = options.expected_rows;
    return with_segments(m_sizes_.readable(), routing);
  }

 private:
  Argument m_sizes_, gather_indices_, router_weights_;
  std::int64_t topk_;
};

}  // namespace moegemm::torch_ops
