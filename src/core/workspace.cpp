#include "core/workspace.h"

#include "core/refusal.h"

namespace moegemm {

Workspace::Workspace(const Plan& plan, const Problem& problem, const ExecutionContext& context) {
  const std::int64_t bytes = plan.workspace_bytes;
  if (bytes == 0) return;
  if (context.memory != nullptr) {
    data_ = static_cast<std::byte*>(context.memory->allocate(bytes, problem.device));
  } else if (problem.device.type == DeviceType::kCpu) {
    own_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes));
    data_ = own_.get();
  } else {
    refuse_value("context.memory is null; ", to_string(problem), " needs ", bytes,
                 " bytes of workspace: ", to_string(plan));
  }
  if (data_ == nullptr) {
    throw Error(ErrorKind::kRuntime, join("there is no memory for the workspace of ",
                                          to_string(problem), ": ", to_string(plan)));
  }
}

}  // namespace moegemm
