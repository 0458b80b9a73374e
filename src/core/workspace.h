#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <utility>

#include "core/planning/lower.h"
#include "moegemm/ops.h"

namespace moegemm {

/// The memory of a plan while it is launched: lent by the caller, who alone may own device memory,
/// or for tensors on the CPU from the heap.
class Workspace {
 public:
  /// Throws where there is none, in the words of whoever has none.
  Workspace(const Plan& plan, const Problem& problem, const ExecutionContext& context);

  std::byte* data() const { return data_; }

 private:
  std::unique_ptr<std::byte[]> own_;
  std::byte* data_ = nullptr;
};

/// A plan's memory; where there is not enough, `planned` becomes `smaller()` if that takes less:
/// the plan without what only saves time. Nothing has been launched then.
template <typename Smaller>
Workspace borrow_workspace(Planned& planned, const Problem& problem,
                           const ExecutionContext& context, const Smaller& smaller) {
  try {
    return Workspace(planned.plan, problem, context);
  } catch (const std::exception&) {
    Planned other = smaller();
    if (other.plan.workspace_bytes >= planned.plan.workspace_bytes) throw;
    planned = std::move(other);
  }
  return Workspace(planned.plan, problem, context);
}

}  // namespace moegemm
