#include <cmath>
#include <cstdio>

#include "core/planning/cost.h"
#include "core/planning/passes.h"
#include "core/planning/planner.h"
#include "core/planning/stored_form.h"
#include "core/refusal.h"
#include "core/registry.h"
#include "moegemm/plan.h"

namespace moegemm {
namespace {

std::string percent(double ratio) {
  char text[32];
  static_cast<void>(std::snprintf(text, sizeof text, "%.0f%%", std::abs(ratio - 1) * 100));
  return text;
}

/// What makes the candidate's predicted time what it is, compared with the chosen one's.
std::string reason(const CostEstimate& cost, const CostEstimate& chosen) {
  if (cost.compute_us > 1.02 * chosen.compute_us && cost.compute_us >= cost.memory_us) {
    return cost.waves > chosen.waves ? "more padding" : "fewer, larger tiles leave units idle";
  }
  if (cost.tile_load_us > 1.02 * chosen.tile_load_us) return "its tiles load more per product";
  return "about the same work";
}

std::string remark_of(const PlanCandidate& candidate, const CostEstimate& chosen,
                      const Plan& plan) {
  if (!candidate.refused.empty()) return candidate.refused;
  if (candidate.chosen) return "chosen: " + plan.product().reason;
  if (plan.source == PlanSource::kManual) return "lost: another one was asked for";
  if (plan.source == PlanSource::kTuned) return "lost: slower when measured";
  if (candidate.cost.total_us <= 0 || chosen.total_us <= 0) return "lost: ranked lower";
  const double ratio = candidate.cost.total_us / chosen.total_us;
  if (ratio > 1.005) {
    return join("lost: predicted ", percent(ratio), " slower, ", reason(candidate.cost, chosen));
  }
  return join("lost: predicted ", ratio < 0.995 ? percent(ratio) + " faster" : "as fast",
              ", measured borders rank it lower");
}

}  // namespace

PlanExplanation explain(const Problem& written, const std::optional<BackendKind>& backend,
                        const std::optional<KernelConfig>& config, bool autotune) {
  const Problem asked = asked_by_hand(written, config);
  const Planned planned = plan_problem(asked, backend, config, autotune);
  const Problem problem = product_of(planned.plan, asked);
  const int chosen = planned.plan.product().kernel;
  PlanExplanation result;
  result.plan = planned.plan;
  result.limits = planned.backend->limits(problem);
  const auto kernels = planned.backend->kernels();
  result.cost = estimate_cost(problem, kernels[chosen], result.limits);
  for (int i = 0; i < static_cast<int>(kernels.size()); ++i) {
    if (kernels[i].op != problem.op) continue;
    PlanCandidate candidate;
    candidate.kernel = kernels[i];
    candidate.chosen = i == chosen;
    candidate.refused = planned.backend->refuse(problem, kernels[i]);
    if (candidate.refused.empty()) {
      candidate.cost = estimate_cost(problem, kernels[i], result.limits);
    }
    candidate.remark = remark_of(candidate, result.cost, planned.plan);
    result.candidates.push_back(std::move(candidate));
  }
  for (const Backend* other : all_backends()) {
    if (other == planned.backend) break;
    std::string why = other->unavailable(problem.device);
    if (why.empty()) why = "no kernel runs this problem, or another backend was asked for";
    result.not_available.push_back(join(to_string(other->kind()), ": ", why));
  }
  return result;
}

}  // namespace moegemm
