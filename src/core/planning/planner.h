#pragma once

#include <functional>
#include <optional>
#include <shared_mutex>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/backend.h"
#include "core/planning/lower.h"
#include "moegemm/plan.h"
#include "moegemm/problem.h"

namespace moegemm {

/// Remembers what `lower` made of each problem. Safe to call from any thread.
class Planner {
 public:
  /// A server sees a new row count with almost every batch; one entry takes about 700 bytes, so
  /// this is under 3 MiB. When full the cache starts again: planning anew costs microseconds.
  static constexpr std::size_t kMaxCachedPlans = 4096;

  /// Names the measurements that `tuned` looks at just now.
  using Measurements = std::function<const void*()>;

  /// Backends in the order of preference.
  explicit Planner(std::span<const Backend* const> backends, TunedKernel tuned = {},
                   Measurements measurements = {})
      : backends_(backends), tuned_(std::move(tuned)), measurements_(std::move(measurements)) {}

  /// Plans a validated problem: see PlanRequest for the other arguments.
  Planned plan(const Problem& problem, const std::optional<BackendKind>& backend,
               const std::optional<KernelConfig>& config, bool autotune = false,
               WorkspaceUse workspace = WorkspaceUse::kFree);

  std::size_t cached_plans() const;
  /// Around a fork: nobody else is making a plan, which may be the first use of something that is
  /// then initialised.
  void stop_planning() { planning_.lock(); }
  /// And nobody changes or reads the plans.
  void hold() { mutex_.lock(); }
  void release();
  void release_in_child();
  /// Something was measured or forgotten: what was planned before may not hold any more.
  void forget_plans();

 private:
  /// The problem and what was requested; the measurements of a request for autotune, else null.
  using Key = std::tuple<Problem, std::optional<BackendKind>, std::optional<KernelConfig>,
                         const void*, WorkspaceUse>;
  /// Looks up without copying the config's string.
  using KeyView =
      std::tuple<const Problem&, const std::optional<BackendKind>&,
                 const std::optional<KernelConfig>&, const void* const&, const WorkspaceUse&>;
  struct KeyHash {
    using is_transparent = void;
    std::size_t operator()(const KeyView& key) const;
  };

  std::span<const Backend* const> backends_;
  TunedKernel tuned_;
  Measurements measurements_;
  std::shared_mutex planning_;  ///< shared by all who make plans
  mutable std::shared_mutex mutex_;
  std::unordered_map<Key, Planned, KeyHash, std::equal_to<>> cache_;
};

/// The planner over every compiled backend, with the measurements of tuning_store().
Planner& process_planner();

/// What it plans. An empty `backend` falls back to MOEGEMM_BACKEND.
Planned plan_problem(const Problem& problem, const std::optional<BackendKind>& backend,
                     const std::optional<KernelConfig>& config, bool autotune = false,
                     WorkspaceUse workspace = WorkspaceUse::kFree);

/// What a call on `context` may do with memory: the heap serves the CPU, device memory is lent.
inline WorkspaceUse workspace_use(const Problem& problem, const ExecutionContext& context) {
  const bool some = context.memory != nullptr || problem.device.type == DeviceType::kCpu;
  return some ? WorkspaceUse::kFree : WorkspaceUse::kAvoid;
}

}  // namespace moegemm
