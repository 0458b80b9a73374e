#include "core/planning/planner.h"

#include <mutex>

#include "core/process/environment.h"
#include "core/registry.h"
#include "core/tuning/cache/store.h"
#include "core/types/hashing.h"

namespace moegemm {

std::size_t Planner::KeyHash::operator()(const KeyView& key) const {
  std::size_t hash = hash_value(key.problem);
  const std::uint64_t backend = key.backend ? static_cast<std::uint64_t>(*key.backend) + 1 : 0;
  hash = fold_hash(
      hash, (backend * 2 + (key.autotune ? 1 : 0)) * 4 + static_cast<std::uint64_t>(key.workspace));
  if (key.config) {
    // The TMA flags are left to equality: few calls differ in nothing else.
    hash = fold_hash(hash, static_cast<std::uint64_t>(key.config->block_rows));
    hash = fold_hash(hash, static_cast<std::uint64_t>(key.config->block_cols));
    hash = fold_hash(hash, static_cast<std::uint64_t>(key.config->block_depth));
    hash = fold_hash(hash, static_cast<std::uint64_t>(key.config->stages));
    hash = fold_hash(hash, std::hash<std::string>{}(key.config->kernel));
  }
  return hash;
}

std::size_t Planner::KeyHash::operator()(const Key& key) const {
  return (*this)(KeyView{key.problem, key.backend, key.config, key.autotune, key.workspace});
}

Planned Planner::plan(const Problem& problem, const std::optional<BackendKind>& backend,
                      const std::optional<KernelConfig>& config, bool autotune,
                      WorkspaceUse workspace) {
  {
    std::shared_lock lock(mutex_);
    const auto found = cache_.find(KeyView{problem, backend, config, autotune, workspace});
    if (found != cache_.end()) return found->second;
  }
  Planned planned = lower(problem, {backend, config, autotune, workspace}, backends_, tuned_);
  std::unique_lock lock(mutex_);
  if (cache_.size() >= kMaxCachedPlans) cache_.clear();
  cache_.insert_or_assign(Key{problem, backend, config, autotune, workspace}, planned);
  return planned;
}

std::size_t Planner::cached_plans() const {
  std::shared_lock lock(mutex_);
  return cache_.size();
}

void Planner::forget_plans() {
  std::unique_lock lock(mutex_);
  cache_.clear();
}

Planner& process_planner() {
  static Planner planner(all_backends(), [](const Problem& problem, const Backend& backend) {
    const auto record = tuning_store().find(tuning_key(problem, backend));
    return record ? record->kernel : std::string();
  });
  return planner;
}

Planned plan_problem(const Problem& problem, const std::optional<BackendKind>& backend,
                     const std::optional<KernelConfig>& config, bool autotune,
                     WorkspaceUse workspace) {
  return process_planner().plan(problem, backend ? backend : environment_backend(), config,
                                autotune, workspace);
}

}  // namespace moegemm
