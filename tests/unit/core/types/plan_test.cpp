#include "moegemm/plan.h"

#include <gtest/gtest.h>

#include <unordered_set>
#include <vector>

namespace moegemm {
namespace {

Step product() {
  Step step;
  step.backend = BackendKind::kSm90;
  step.kernel = 7;
  step.kernel_name = "dw";
  step.tile = {128, 256, 64};
  step.stages = 4;
  step.grid = 132;
  step.reason = "it is the only one";
  return step;
}

Step pass(StepKind kind, std::int64_t offset) {
  Step step;
  step.kind = kind;
  step.workspace_offset = offset;
  return step;
}

Plan example(const Step& step = product()) {
  Plan plan;
  plan.steps = Steps({step});
  return plan;
}

TEST(Plan, PrintsBackendKernelTileStagesGridAndSource) {
  EXPECT_EQ(to_string(example()), "sm90/dw tile 128x256x64 stages 4 grid 132 (heuristic)");
}

TEST(Plan, PrintsNoGridOfACpuStep) {
  Step step = product();
  step.grid = 0;
  EXPECT_EQ(to_string(step), "sm90/dw tile 128x256x64 stages 4");
}

TEST(Plan, PrintsItsNote) {
  Plan plan = example();
  plan.source = PlanSource::kManual;
  plan.note = "asked for something else";
  EXPECT_EQ(to_string(plan),
            "sm90/dw tile 128x256x64 stages 4 grid 132 (manual): asked for something else");
}

TEST(Plan, PrintsEveryStepAndItsWorkspace) {
  Plan plan;
  plan.steps = Steps({pass(StepKind::kScaleX, 0), pass(StepKind::kGatherDy, 512), product(),
                      pass(StepKind::kActivate, -1)});
  plan.workspace_bytes = 1024;
  EXPECT_EQ(
      to_string(plan),
      "scale X, then gather dY, then sm90/dw tile 128x256x64 stages 4 grid 132, then activate "
      "(heuristic), workspace 1024 bytes");
  EXPECT_EQ(plan.product().kernel_name, "dw");
  EXPECT_TRUE(plan.has(StepKind::kGatherDy));
  EXPECT_FALSE(plan.has(StepKind::kGatherX));
}

TEST(Plan, PrintsOrderOfTilesAndCachePolicyWhereTheyAreNotTheUsualOnes) {
  Step step = product();
  step.order = TileOrder::kAlongRows;
  step.weights = WeightCaching::kPassThrough;
  EXPECT_EQ(to_string(step),
            "sm90/dw tile 128x256x64 stages 4 grid 132 tiles along rows weights pass through L2");
}

TEST(Plan, PrintsWhenALaunchStartsWhereThatIsBeforeTheOneAheadHasEnded) {
  Step step = product();
  step.start = LaunchStart::kEarly;
  EXPECT_EQ(to_string(step), "sm90/dw tile 128x256x64 stages 4 grid 132 starts early");
  step.start = LaunchStart::kWithWeights;
  EXPECT_EQ(to_string(step), "sm90/dw tile 128x256x64 stages 4 grid 132 starts early with weights");
}

TEST(Plan, CopiesShareTheirSteps) {
  const Plan plan = example();
  const Plan copy = plan;
  EXPECT_EQ(copy.steps.begin(), plan.steps.begin());
  EXPECT_EQ(copy, plan);
}

TEST(Plan, EveryFieldCountsForEqualityAndHash) {
  std::unordered_set<Plan> plans = {example(), Plan{}};
  std::size_t count = 2;
  const auto add_step = [&](auto change) {
    Step step = product();
    change(step);
    plans.insert(example(step));
    ++count;
  };
  add_step([](Step& s) { s.kind = StepKind::kGatherX; });
  add_step([](Step& s) { s.backend = BackendKind::kSm80; });
  add_step([](Step& s) { s.kernel = 8; });
  add_step([](Step& s) { s.kernel_name = "fwd"; });
  add_step([](Step& s) { s.tile.rows = 64; });
  add_step([](Step& s) { s.tile.columns = 128; });
  add_step([](Step& s) { s.tile.depth = 32; });
  add_step([](Step& s) { s.stages = 3; });
  add_step([](Step& s) { s.smem_bytes = 1024; });
  add_step([](Step& s) { s.grid = 131; });
  add_step([](Step& s) { s.order = TileOrder::kFullTilesFirst; });
  add_step([](Step& s) { s.weights = WeightCaching::kPassThrough; });
  add_step([](Step& s) { s.start = LaunchStart::kEarly; });
  add_step([](Step& s) { s.workspace_offset = 0; });
  add_step([](Step& s) { s.reason = "another one"; });
  const auto add = [&](auto change) {
    Plan plan = example();
    change(plan);
    plans.insert(plan);
    ++count;
  };
  add([](Plan& p) { p.steps = Steps({product(), product()}); });
  add([](Plan& p) { p.workspace_bytes = 256; });
  add([](Plan& p) { p.source = PlanSource::kTuned; });
  add([](Plan& p) { p.note = "why"; });
  EXPECT_EQ(plans.size(), count);
  EXPECT_EQ(example(), example());
  EXPECT_EQ(hash_value(example()), hash_value(example()));
}

}  // namespace
}  // namespace moegemm
