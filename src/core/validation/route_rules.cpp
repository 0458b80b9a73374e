#include "core/validation/route_rules.h"

#include "core/refusal.h"
#include "core/registry.h"

namespace moegemm {

void require_experts(std::int64_t num_experts) {
  if (num_experts < 1) {
    refuse_value("num_experts is ", num_experts, "; it must be at least 1");
  }
}

void require_routes(const Argument& expert_ids, std::int64_t num_experts, const Argument& m_sizes) {
  require_form(expert_ids, {{2, "[T, topk]"}});
  require_index(expert_ids);
  require_extent(expert_ids, expert_ids.view.shape[1], "topk, its last dimension,");
  require_topk(expert_ids.view.shape[1]);
  require_experts(num_experts);
  require_sizes(m_sizes, expert_ids);
  require_shape(m_sizes, {num_experts}, "[E]");
  const std::int64_t rows = expert_ids.view.numel();
  if (m_sizes.view.dtype == DType::kInt32 && rows > INT32_MAX) {
    refuse_value("gather_indices is int32, but T * topk = ", rows, " rows need int64 indices");
  }
}

const Passes& require_workspace(const void* workspace, const TensorView& expert_ids,
                                std::int64_t num_experts) {
  const Passes& passes = passes_for(expert_ids.device);
  const std::int64_t needed = passes.route_workspace_bytes(expert_ids.numel(), num_experts);
  if (workspace == nullptr && needed > 0) {
    refuse_value("workspace is null; on ", to_string(expert_ids.device), " route needs ", needed,
                 " bytes of device memory");
  }
  return passes;
}

}  // namespace moegemm
