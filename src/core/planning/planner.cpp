#include "core/planning/planner.h"

#include <mutex>
#include <new>

#include "core/process/environment.h"
#include "core/process/fork.h"
#include "core/registry.h"
#include "core/tuning/cache/store.h"
#include "core/types/hashing.h"

namespace moegemm {
namespace {

[[maybe_unused]] const bool kForksSurvived = survive_forks();  // when the library is loaded

}  // namespace

std::size_t Planner::KeyHash::operator()(const KeyView& key) const {
  const auto& [problem, backend, config, measurements, workspace] = key;
  std::size_t hash = hash_value(problem);
  const std::uint64_t kind = backend ? static_cast<std::uint64_t>(*backend) + 1 : 0;
  hash = fold_hash(hash, (kind * 2 + (measurements != nullptr ? 1 : 0)) * 4 +
                             static_cast<std::uint64_t>(workspace));
  if (config) {
    // The TMA flags are left to equality: few calls differ in nothing else.
    hash = fold_hash(hash, static_cast<std::uint64_t>(config->block_rows));
    hash = fold_hash(hash, static_cast<std::uint64_t>(config->block_columns));
    hash = fold_hash(hash, static_cast<std::uint64_t>(config->block_depth));
    hash = fold_hash(hash, static_cast<std::uint64_t>(config->stages));
    hash = fold_hash(hash, std::hash<std::string>{}(config->kernel));
  }
  return hash;
}

Planned Planner::plan(const Problem& problem, const std::optional<BackendKind>& backend,
                      const std::optional<KernelConfig>& config, bool autotune,
                      WorkspaceUse workspace) {
  const void* const measurements = !autotune ? nullptr : measurements_ ? measurements_() : this;
  const KeyView key(problem, backend, config, measurements, workspace);
  {
    std::shared_lock lock(mutex_);
    const auto found = cache_.find(key);
    if (found != cache_.end()) return found->second;
  }
  Planned planned = [&] {
    const std::shared_lock planning(planning_);
    return lower(problem, {backend, config, autotune, workspace}, backends_, tuned_);
  }();
  std::unique_lock lock(mutex_);
  if (cache_.size() >= kMaxCachedPlans) cache_.clear();
  cache_.insert_or_assign(Key(key), planned);
  return planned;
}

std::size_t Planner::cached_plans() const {
  std::shared_lock lock(mutex_);
  return cache_.size();
}

void Planner::release() {
  mutex_.unlock();
  planning_.unlock();
}

void Planner::release_in_child() {
  // The thread has another id than in the parent, so that it may not unlock what it has locked.
  new (&mutex_) std::shared_mutex;
  new (&planning_) std::shared_mutex;
}

void Planner::forget_plans() {
  std::unique_lock lock(mutex_);
  cache_.clear();
}

Planner& process_planner() {
  static Planner planner(
      all_backends(),
      [](const Problem& problem, const Backend& backend) {
        const auto record = tuning_store().find(tuning_key(problem, backend));
        return record ? record->kernel : std::string();
      },
      [] { return &tuning_store(); });
  return planner;
}

Planned plan_problem(const Problem& problem, const std::optional<BackendKind>& backend,
                     const std::optional<KernelConfig>& config, bool autotune,
                     WorkspaceUse workspace) {
  return process_planner().plan(problem, backend ? backend : environment_backend(), config,
                                autotune, workspace);
}

}  // namespace moegemm
