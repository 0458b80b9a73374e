#include "moegemm/plan.h"

#include <functional>

#include "core/refusal.h"
#include "core/types/hashing.h"
#include "core/types/names.h"

namespace moegemm {
namespace {

constexpr Named<PlanSource> kPlanSources[] = {
    {PlanSource::kHeuristic, "heuristic"},
    {PlanSource::kTuned, "tuned"},
    {PlanSource::kManual, "manual"},
};
constexpr Named<StepKind> kStepKinds[] = {
    {StepKind::kProduct, "product"},
    {StepKind::kScaleX, "scale X"},
    {StepKind::kDequantise, "dequantise W"},
    {StepKind::kAlignX, "align X"},
    {StepKind::kAlignDy, "align dY"},
    {StepKind::kAlignW, "align W"},
    {StepKind::kTrim, "trim"},
    {StepKind::kGatherX, "gather X"},
    {StepKind::kGatherDy, "gather dY"},
    {StepKind::kZeroGaps, "zero gaps"},
    {StepKind::kActivate, "activate"},
};
constexpr Named<TileOrder> kTileOrders[] = {
    {TileOrder::kByExpert, "by expert"},
    {TileOrder::kFullTilesFirst, "full first"},
    {TileOrder::kAlongColumns, "along columns"},
    {TileOrder::kAlongRows, "along rows"},
};
constexpr Named<LaunchStart> kLaunchStarts[] = {
    {LaunchStart::kAfter, "after"},
    {LaunchStart::kEarly, "early"},
    {LaunchStart::kWithWeights, "early with weights"},
};

std::uint64_t word(int high, int low) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 32 |
         static_cast<std::uint32_t>(low);
}

std::size_t fold_step(std::size_t hash, const Step& step) {
  const std::uint64_t small =
      static_cast<std::uint64_t>(step.start) << 40 |
      static_cast<std::uint64_t>(step.columns) << 32 | static_cast<std::uint64_t>(step.kind) << 24 |
      static_cast<std::uint64_t>(step.backend) << 16 | static_cast<std::uint64_t>(step.order) << 8 |
      static_cast<std::uint64_t>(step.weights);
  hash = fold_hash(hash, small);
  hash = fold_hash(hash, word(step.kernel, step.stages));
  hash = fold_hash(hash, word(step.tile.rows, step.tile.columns));
  hash = fold_hash(hash, word(step.tile.depth, step.grid));
  hash = fold_hash(hash, static_cast<std::uint64_t>(step.smem_bytes));
  hash = fold_hash(hash, static_cast<std::uint64_t>(step.workspace_offset));
  hash = fold_hash(hash, static_cast<std::uint64_t>(step.first_feature));
  hash = fold_hash(hash, static_cast<std::uint64_t>(step.features));
  hash = fold_hash(hash, std::hash<std::string>{}(step.kernel_name));
  return fold_hash(hash, std::hash<std::string>{}(step.reason));
}

}  // namespace

const char* to_string(PlanSource source) { return name_in(kPlanSources, source); }
const char* to_string(StepKind kind) { return name_in(kStepKinds, kind); }
const char* to_string(TileOrder order) { return name_in(kTileOrders, order); }
const char* to_string(LaunchStart start) { return name_in(kLaunchStarts, start); }

std::string to_string(const Step& step) {
  const std::string cut = step.features == 0 ? ""
                                             : join(" features ", step.first_feature, " to ",
                                                    step.first_feature + step.features - 1);
  if (step.kind != StepKind::kProduct) return to_string(step.kind) + cut;
  std::string text = join(to_string(step.backend), "/", step.kernel_name, " tile ", step.tile.rows,
                          "x", step.tile.columns, "x", step.tile.depth, " stages ", step.stages);
  if (step.grid > 0) text += join(" grid ", step.grid);
  if (step.order != TileOrder::kByExpert) text += join(" tiles ", to_string(step.order));
  if (step.columns == Columns::kFirstHalf) text += " first half";
  if (step.columns == Columns::kSecondHalf) text += " second half";
  text += cut;
  if (step.weights == WeightCaching::kPassThrough) text += " weights pass through L2";
  if (step.start != LaunchStart::kAfter) text += join(" starts ", to_string(step.start));
  return text;
}

std::string to_string(const Plan& plan) {
  std::string text;
  for (const Step& step : plan.steps) {
    text += join(text.empty() ? "" : ", then ", to_string(step));
  }
  text += join(" (", to_string(plan.source), ")");
  if (plan.workspace_bytes > 0) text += join(", workspace ", plan.workspace_bytes, " bytes");
  if (!plan.note.empty()) text += ": " + plan.note;
  return text;
}

std::size_t hash_value(const Plan& plan) {
  std::size_t hash = fold_hash(static_cast<std::size_t>(plan.source),
                               static_cast<std::uint64_t>(plan.workspace_bytes));
  for (const Step& step : plan.steps) hash = fold_step(hash, step);
  return fold_hash(hash, std::hash<std::string>{}(plan.note));
}

}  // namespace moegemm
