#include "core/planner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "core/environment.h"
#include "core/hashing.h"
#include "core/refusal.h"
#include "core/registry.h"

namespace moegemm {
namespace {

/// A server sees a new row count with almost every batch; one entry takes about 300 bytes, so this
/// is about 1 MiB. When full the cache starts again: planning anew costs microseconds.
constexpr std::size_t kMaxCachedPlans = 4096;

struct PlanKey {
  Problem problem;
  std::optional<BackendKind> forced;
  std::optional<KernelConfig> config;
};

/// Looks up without copying the config's string.
struct PlanKeyView {
  const Problem& problem;
  const std::optional<BackendKind>& forced;
  const std::optional<KernelConfig>& config;
};

struct PlanKeyHash {
  using is_transparent = void;
  template <typename Key>
  std::size_t operator()(const Key& key) const {
    std::size_t hash = hash_value(key.problem);
    hash = fold_hash(hash, key.forced ? static_cast<std::uint64_t>(*key.forced) + 1 : 0);
    if (key.config) {
      hash = fold_hash(hash, static_cast<std::uint64_t>(key.config->block_rows));
      hash = fold_hash(hash, static_cast<std::uint64_t>(key.config->block_cols));
      hash = fold_hash(hash, static_cast<std::uint64_t>(key.config->block_depth));
      hash = fold_hash(hash, static_cast<std::uint64_t>(key.config->stages));
      hash = fold_hash(hash, std::hash<std::string>{}(key.config->kernel));
    }
    return hash;
  }
};

struct PlanKeyEqual {
  using is_transparent = void;
  template <typename A, typename B>
  bool operator()(const A& a, const B& b) const {
    return a.problem == b.problem && a.forced == b.forced && a.config == b.config;
  }
};

class PlanCache {
 public:
  std::optional<Planned> find(const PlanKeyView& key) const {
    std::shared_lock lock(mutex_);
    const auto found = plans_.find(key);
    return found == plans_.end() ? std::nullopt : std::optional(found->second);
  }

  void insert(const PlanKeyView& key, const Planned& planned) {
    std::unique_lock lock(mutex_);
    if (plans_.size() >= kMaxCachedPlans) plans_.clear();
    plans_.insert_or_assign(PlanKey{key.problem, key.forced, key.config}, planned);
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<PlanKey, Planned, PlanKeyHash, PlanKeyEqual> plans_;
};

/// Why a backend cannot run this problem at all; empty if it can.
std::string why_not(const Backend& backend, const Problem& problem) {
  std::string reason = backend.unavailable(problem.device);
  if (!reason.empty()) return reason;
  reason = "it has no kernels";
  for (const KernelInfo& kernel : backend.kernels()) {
    std::string refusal = backend.refuse(problem, kernel);
    if (refusal.empty()) return {};
    // A kernel of the same op says more than "this one is for dW".
    if (kernel.op == problem.op || reason == "it has no kernels") reason = std::move(refusal);
  }
  return reason;
}

const Backend& find_backend(const Problem& problem, const std::optional<BackendKind>& forced) {
  std::string reasons;
  for (const Backend* backend : all_backends()) {
    if (forced && backend->kind() != *forced) continue;
    const std::string reason = why_not(*backend, problem);
    if (reason.empty()) return *backend;
    reasons += join(reasons.empty() ? "" : "; ", to_string(backend->kind()), ": ", reason);
  }
  if (reasons.empty()) {
    reasons = join(to_string(*forced), ": not compiled into this library");
  }
  throw Error(ErrorKind::kNotImplemented, join("no ", forced ? "forced backend" : "backend",
                                               " runs ", to_string(problem), " (", reasons, ")"));
}

/// How far a kernel is from what was asked, in doublings summed over the extents that were given.
double distance(const KernelConfig& wanted, const KernelInfo& kernel) {
  const auto doublings = [](int asked, int have) {
    return asked == 0 ? 0.0 : std::abs(std::log2(static_cast<double>(asked) / std::max(have, 1)));
  };
  return doublings(wanted.block_rows, kernel.tile.rows) +
         doublings(wanted.block_cols, kernel.tile.cols) +
         doublings(wanted.block_depth, kernel.tile.depth) + doublings(wanted.stages, kernel.stages);
}

Planned plan_named(const Problem& problem, const std::optional<BackendKind>& forced,
                   const std::string& name) {
  std::string reasons;
  for (const Backend* backend : all_backends()) {
    if (forced && backend->kind() != *forced) continue;
    const auto kernels = backend->kernels();
    for (std::size_t i = 0; i < kernels.size(); ++i) {
      if (kernels[i].name != name) continue;
      std::string reason = backend->unavailable(problem.device);
      if (reason.empty()) reason = backend->refuse(problem, kernels[i]);
      if (reason.empty()) {
        Plan plan = backend->plan_with(problem, static_cast<int>(i));
        plan.source = PlanSource::kManual;
        return {backend, std::move(plan)};
      }
      reasons += join(reasons.empty() ? "" : "; ", to_string(backend->kind()), ": ", reason);
    }
  }
  if (reasons.empty()) {
    refuse_value("config.kernel is '", name, "'; no ", forced ? to_string(*forced) : "compiled",
                 " kernel has that name (`moegemm info --kernels` lists them)");
  }
  refuse_value("config.kernel is '", name, "', which does not run ", to_string(problem), " (",
               reasons, ")");
}

Plan plan_nearest(const Backend& backend, const Problem& problem, const KernelConfig& config) {
  // The heuristic's kernel first: it stays unless another one is strictly nearer.
  const auto kernels = backend.kernels();
  int nearest = backend.choose(problem);
  double nearest_distance = distance(config, kernels[nearest]);
  for (std::size_t i = 0; i < kernels.size() && nearest_distance > 0; ++i) {
    const double candidate = distance(config, kernels[i]);
    if (candidate < nearest_distance && backend.refuse(problem, kernels[i]).empty()) {
      nearest = static_cast<int>(i);
      nearest_distance = candidate;
    }
  }
  Plan plan = backend.plan_with(problem, nearest);
  plan.source = PlanSource::kManual;
  if (nearest_distance > 0) {
    const KernelInfo& kernel = kernels[nearest];
    plan.note = join("asked for ", to_string(config), ", the nearest compiled kernel is ",
                     kernel.name, " with tile ", kernel.tile.rows, "x", kernel.tile.cols, "x",
                     kernel.tile.depth, " stages ", kernel.stages);
  }
  return plan;
}

Planned make_plan(const Problem& problem, const std::optional<BackendKind>& forced,
                  const std::optional<KernelConfig>& config) {
  if (config && !config->kernel.empty()) return plan_named(problem, forced, config->kernel);
  const Backend& backend = find_backend(problem, forced);
  if (config) return {&backend, plan_nearest(backend, problem, *config)};
  return {&backend, backend.plan_with(problem, backend.choose(problem))};
}

}  // namespace

Planned plan_problem(const Problem& problem, const std::optional<BackendKind>& forced,
                     const std::optional<KernelConfig>& config) {
  static PlanCache cache;
  const std::optional<BackendKind> backend = forced ? forced : environment_backend();
  const PlanKeyView key{problem, backend, config};
  if (std::optional<Planned> cached = cache.find(key)) return *std::move(cached);
  Planned planned = make_plan(problem, backend, config);
  cache.insert(key, planned);
  return planned;
}

}  // namespace moegemm
