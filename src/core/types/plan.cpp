#include "moegemm/plan.h"

#include <functional>

#include "core/refusal.h"
#include "core/types/hashing.h"

namespace moegemm {

const char* to_string(PlanSource source) {
  switch (source) {
    case PlanSource::kHeuristic:
      return "heuristic";
    case PlanSource::kTuned:
      return "tuned";
    case PlanSource::kManual:
      return "manual";
  }
  return "?";
}

std::string to_string(const Plan& plan) {
  std::string text = join(to_string(plan.backend), "/", plan.kernel_name, " tile ", plan.tile.rows,
                          "x", plan.tile.cols, "x", plan.tile.depth, " stages ", plan.stages,
                          " grid ", plan.grid, " (", to_string(plan.source), ")");
  if (plan.gathers_first) text += ", after its rows are gathered";
  if (plan.composed) text += ", then the activation";
  if (!plan.note.empty()) text += ": " + plan.note;
  return text;
}

std::size_t hash_value(const Plan& plan) {
  const auto word = [](int high, int low) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 32 |
           static_cast<std::uint32_t>(low);
  };
  std::size_t hash = fold_hash(static_cast<std::size_t>(plan.backend),
                               static_cast<std::uint64_t>(plan.source) * 4 +
                                   (plan.composed ? 2 : 0) + (plan.gathers_first ? 1 : 0));
  hash = fold_hash(hash, word(plan.kernel, plan.stages));
  hash = fold_hash(hash, word(plan.tile.rows, plan.tile.cols));
  hash = fold_hash(hash, word(plan.tile.depth, plan.grid));
  hash = fold_hash(hash, std::hash<std::string>{}(plan.kernel_name));
  return fold_hash(hash, std::hash<std::string>{}(plan.note));
}

}  // namespace moegemm
