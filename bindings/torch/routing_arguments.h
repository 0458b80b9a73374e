#pragma once

#include <optional>

#include "arguments.h"
#include "moegemm/ops.h"

namespace moegemm::torch_ops {

/// The tensors that say which row belongs to which expert, of a pass.
class RoutingArguments {
 public:
  RoutingArguments(const Tensor& m_sizes, const std::optional<Tensor>& gather_indices,
                   const std::optional<Tensor>& router_weights, std::int64_t topk)
      : m_sizes_("m_sizes", m_sizes),
        gather_indices_("gather_indices", gather_indices),
        router_weights_("router_weights", router_weights),
        topk_(topk) {}

  RoutingView readable() {
    return {m_sizes_.readable(), gather_indices_.readable(), router_weights_.readable_dense(),
            topk_};
  }

 private:
  Argument m_sizes_, gather_indices_, router_weights_;
  std::int64_t topk_;
};

}  // namespace moegemm::torch_ops
