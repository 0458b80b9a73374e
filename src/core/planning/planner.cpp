#include "core/planning/planner.h"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "core/process/environment.h"
#include "core/refusal.h"
#include "core/registry.h"
#include "core/tuning/cache/store.h"
#include "core/types/hashing.h"

namespace moegemm {
namespace {

void add_reason(std::string& reasons, const Backend& backend, const std::string& reason) {
  reasons += join(reasons.empty() ? "" : "; ", to_string(backend.kind()), ": ", reason);
}

/// Why a backend cannot run this problem with any of its kernels; empty if it can. The reason of a
/// kernel for the same op says more than "this one computes dW".
std::string why_not(const Backend& backend, const Problem& problem) {
  std::string reason = backend.unavailable(problem.device);
  if (!reason.empty()) return reason;
  reason = join("it has no kernel for ", to_string(problem.op));
  for (const KernelInfo& kernel : backend.kernels()) {
    std::string refusal = backend.refuse(problem, kernel);
    if (refusal.empty()) return {};
    if (kernel.op == problem.op) reason = std::move(refusal);
  }
  return reason;
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

Plan plan_nearest(const Backend& backend, const Problem& problem, const KernelConfig& config) {
  // The heuristic's kernel comes first: it stays unless another one is strictly nearer.
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
    plan.note = join("asked for ", to_string(config), "; the nearest kernel is ", kernel.name,
                     " with tile ", kernel.tile.rows, "x", kernel.tile.cols, "x", kernel.tile.depth,
                     " stages ", kernel.stages);
  }
  return plan;
}

}  // namespace

std::size_t Planner::KeyHash::operator()(const KeyView& key) const {
  std::size_t hash = hash_value(key.problem);
  const std::uint64_t forced = key.forced ? static_cast<std::uint64_t>(*key.forced) + 1 : 0;
  hash = fold_hash(hash, forced * 2 + (key.autotune ? 1 : 0));
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
  return (*this)(KeyView{key.problem, key.forced, key.config, key.autotune});
}

Planned Planner::plan(const Problem& problem, const std::optional<BackendKind>& forced,
                      const std::optional<KernelConfig>& config, bool autotune) {
  {
    std::shared_lock lock(mutex_);
    const auto found = cache_.find(KeyView{problem, forced, config, autotune});
    if (found != cache_.end()) return found->second;
  }
  Planned planned = make_plan(problem, forced, config, autotune);
  std::unique_lock lock(mutex_);
  if (cache_.size() >= kMaxCachedPlans) cache_.clear();
  cache_.insert_or_assign(Key{problem, forced, config, autotune}, planned);
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

Planned Planner::make_plan(const Problem& problem, const std::optional<BackendKind>& forced,
                           const std::optional<KernelConfig>& config, bool autotune) const {
  if (problem.activation) {
    const Backend* fusing = find_fusing(problem, forced, config);
    if (!fusing) {
      Planned planned = make_plan(problem.bare_product(), forced, config, autotune);
      planned.plan.composed = true;
      return planned;
    }
    if (!config || config->kernel.empty()) return plan_on(*fusing, problem, config, autotune);
  }
  if (config && !config->kernel.empty()) return plan_named(problem, forced, config->kernel);
  return plan_on(find_backend(problem, forced), problem, config, autotune);
}

Planned Planner::plan_on(const Backend& backend, const Problem& problem,
                         const std::optional<KernelConfig>& config, bool autotune) const {
  if (config) return {&backend, plan_nearest(backend, problem, *config)};
  Planned planned = {&backend, autotune && tuned_
                                   ? plan_tuned(problem, backend)
                                   : backend.plan_with(problem, backend.choose(problem))};
  planned.plan.gathers_first =
      problem.op == Op::kDw && problem.gathers() && backend.gathering_first_is_faster(problem);
  return planned;
}

const Backend* Planner::find_fusing(const Problem& problem,
                                    const std::optional<BackendKind>& forced,
                                    const std::optional<KernelConfig>& config) const {
  const bool named = config && !config->kernel.empty();
  // Only the backend that is best for the product: a lesser one's fusion would not make up for it.
  const Backend& backend = find_backend(problem.bare_product(), forced);
  if (!named && !backend.fusing_is_faster(problem)) return nullptr;
  for (const KernelInfo& kernel : backend.kernels()) {
    if (named && kernel.name != config->kernel) continue;
    if (backend.refuse(problem, kernel).empty()) return &backend;
  }
  return nullptr;
}

Plan Planner::plan_tuned(const Problem& problem, const Backend& backend) const {
  const std::string name = tuned_(problem, backend);
  const auto kernels = backend.kernels();
  const auto found = std::find_if(kernels.begin(), kernels.end(),
                                  [&](const KernelInfo& kernel) { return kernel.name == name; });
  // A bucket holds many problems: what won for one of them may not run another.
  if (found != kernels.end() && backend.refuse(problem, *found).empty()) {
    Plan plan = backend.plan_with(problem, static_cast<int>(found - kernels.begin()));
    plan.source = PlanSource::kTuned;
    return plan;
  }
  Plan plan = backend.plan_with(problem, backend.choose(problem));
  if (found != kernels.end()) plan.source = PlanSource::kTuned;  // nothing is left to be measured
  return plan;
}

const Backend& Planner::find_backend(const Problem& problem,
                                     const std::optional<BackendKind>& forced) const {
  std::string reasons;
  for (const Backend* backend : backends_) {
    if (forced && backend->kind() != *forced) continue;
    const std::string reason = why_not(*backend, problem);
    if (reason.empty()) return *backend;
    add_reason(reasons, *backend, reason);
  }
  if (reasons.empty()) reasons = "not compiled into this library";
  const std::string who = forced ? join("backend ", to_string(*forced), " does not run ")
                                 : std::string("no backend runs ");
  throw Error(ErrorKind::kNotImplemented, join(who, to_string(problem), " (", reasons, ")"));
}

Planned Planner::plan_named(const Problem& problem, const std::optional<BackendKind>& forced,
                            const std::string& name) const {
  std::string reasons;
  for (const Backend* backend : backends_) {
    if (forced && backend->kind() != *forced) continue;
    const auto kernels = backend->kernels();
    const auto found = std::find_if(kernels.begin(), kernels.end(),
                                    [&](const KernelInfo& kernel) { return kernel.name == name; });
    if (found == kernels.end()) continue;
    std::string reason = backend->unavailable(problem.device);
    if (reason.empty()) reason = backend->refuse(problem, *found);
    if (reason.empty()) {
      Plan plan = backend->plan_with(problem, static_cast<int>(found - kernels.begin()));
      plan.source = PlanSource::kManual;
      return {backend, std::move(plan)};
    }
    add_reason(reasons, *backend, reason);
  }
  if (reasons.empty()) {
    refuse_value("config.kernel is '", name, "'; no ", forced ? to_string(*forced) : "compiled",
                 " kernel has that name (`moegemm info --kernels` lists them)");
  }
  refuse_value("config.kernel is '", name, "', which does not run ", to_string(problem), " (",
               reasons, ")");
}

Planner& process_planner() {
  static Planner planner(all_backends(), [](const Problem& problem, const Backend& backend) {
    const auto record = tuning_store().find(tuning_key(problem, backend));
    return record ? record->kernel : std::string();
  });
  return planner;
}

Planned plan_problem(const Problem& problem, const std::optional<BackendKind>& forced,
                     const std::optional<KernelConfig>& config, bool autotune) {
  return process_planner().plan(problem, forced ? forced : environment_backend(), config, autotune);
}

}  // namespace moegemm
