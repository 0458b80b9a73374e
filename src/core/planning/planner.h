#pragma once

#include <functional>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/backend.h"
#include "moegemm/config.h"
#include "moegemm/plan.h"
#include "moegemm/problem.h"

namespace moegemm {

/// Who runs a problem, and how.
struct Planned {
  const Backend* backend = nullptr;
  Plan plan;
};

/// The kernel that measurements found fastest for a problem on a backend; empty: none did.
using TunedKernel = std::function<std::string(const Problem&, const Backend&)>;

/// Chooses among backends, best first, and remembers what it chose. Safe to call from any thread.
class Planner {
 public:
  /// A server sees a new row count with almost every batch; one entry takes about 400 bytes, so
  /// this is under 2 MiB. When full the cache starts again: planning anew costs microseconds.
  static constexpr std::size_t kMaxCachedPlans = 4096;

  explicit Planner(std::span<const Backend* const> backends, TunedKernel tuned = {})
      : backends_(backends), tuned_(std::move(tuned)) {}

  /// Plans a validated problem. `forced` limits the choice to one backend; `config` asks for a
  /// kernel by hand, which outranks `autotune`: the measured kernel where there is one. Throws
  /// kNotImplemented, with every backend's reason, when nothing runs it.
  Planned plan(const Problem& problem, const std::optional<BackendKind>& forced,
               const std::optional<KernelConfig>& config, bool autotune = false);

  std::size_t cached_plans() const;
  /// Something was measured or forgotten: what was planned before may not hold any more.
  void forget_plans();

 private:
  struct Key {
    Problem problem;
    std::optional<BackendKind> forced;
    std::optional<KernelConfig> config;
    bool autotune;
  };
  /// Looks up without copying the config's string.
  struct KeyView {
    const Problem& problem;
    const std::optional<BackendKind>& forced;
    const std::optional<KernelConfig>& config;
    bool autotune;
  };
  struct KeyHash {
    using is_transparent = void;
    std::size_t operator()(const KeyView& key) const;
    std::size_t operator()(const Key& key) const;
  };
  struct KeyEqual {
    using is_transparent = void;
    template <typename A, typename B>
    bool operator()(const A& a, const B& b) const {
      return a.problem == b.problem && a.forced == b.forced && a.config == b.config &&
             a.autotune == b.autotune;
    }
  };

  Planned make_plan(const Problem& problem, const std::optional<BackendKind>& forced,
                    const std::optional<KernelConfig>& config, bool autotune) const;
  Planned plan_on(const Backend& backend, const Problem& problem,
                  const std::optional<KernelConfig>& config, bool autotune) const;
  /// The backend that runs the product of an activated problem, if it does better in one kernel.
  const Backend* find_fusing(const Problem& problem, const std::optional<BackendKind>& forced,
                             const std::optional<KernelConfig>& config) const;
  Plan plan_tuned(const Problem& problem, const Backend& backend) const;
  Planned plan_named(const Problem& problem, const std::optional<BackendKind>& forced,
                     const std::string& name) const;
  const Backend& find_backend(const Problem& problem,
                              const std::optional<BackendKind>& forced) const;

  std::span<const Backend* const> backends_;
  TunedKernel tuned_;
  mutable std::shared_mutex mutex_;
  std::unordered_map<Key, Planned, KeyHash, KeyEqual> cache_;
};

/// The planner over every compiled backend, with the measurements of tuning_store().
Planner& process_planner();

/// What it plans. An empty `forced` falls back to MOEGEMM_BACKEND.
Planned plan_problem(const Problem& problem, const std::optional<BackendKind>& forced,
                     const std::optional<KernelConfig>& config, bool autotune = false);

}  // namespace moegemm
