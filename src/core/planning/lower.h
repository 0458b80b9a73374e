#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "core/backend.h"
#include "moegemm/plan.h"
#include "moegemm/problem.h"

namespace moegemm {

/// Who runs the product of a problem, and the whole plan.
struct Planned {
  const Backend* backend = nullptr;
  Plan plan;
};

/// The kernel that measurements found fastest for a problem on a backend; empty: none did.
using TunedKernel = std::function<std::string(const Problem&, const Backend&)>;

/// What lowering may do with memory of the caller.
enum class WorkspaceUse : std::uint8_t {
  kAvoid,   ///< none while any kernel does without, even one with other roundings
  kNeeded,  ///< none that only saves time: the bits are those of kFree
  kFree,    ///< whatever is fastest
};

/// All that decides about a plan besides the problem.
struct PlanRequest {
  const std::optional<BackendKind>& backend;  ///< the only one allowed
  const std::optional<KernelConfig>& config;  ///< a kernel by hand; outranks `autotune`
  bool autotune = false;                      ///< the measured kernel where there is one
  WorkspaceUse workspace = WorkspaceUse::kFree;
};

/// The one place where it is decided how a validated problem runs. Throws kNotImplemented, with
/// every backend's reason, when nothing runs it.
Planned lower(const Problem& problem, const PlanRequest& request,
              std::span<const Backend* const> backends, const TunedKernel& tuned);

/// The plan with kernel number `kernel` of a backend, which is as fast as any plan with it. Nothing
/// where the kernel does not run the problem, and then the reason as a clause in `why_not`.
std::optional<Plan> lower_with_kernel(const Problem& problem, const Backend& backend, int kernel,
                                      WorkspaceUse workspace, std::string& why_not);

}  // namespace moegemm
