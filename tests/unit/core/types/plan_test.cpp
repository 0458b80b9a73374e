#include "moegemm/plan.h"

#include <gtest/gtest.h>

#include <unordered_set>

namespace moegemm {
namespace {

Plan example() {
  Plan plan;
  plan.backend = BackendKind::kSm90;
  plan.kernel = 7;
  plan.kernel_name = "fwd_gather";
  plan.tile = {128, 256, 64};
  plan.stages = 4;
  plan.grid = 132;
  return plan;
}

TEST(Plan, PrintsBackendKernelTileStagesGridAndSource) {
  EXPECT_EQ(to_string(example()), "sm90/fwd_gather tile 128x256x64 stages 4 grid 132 (heuristic)");
}

TEST(Plan, PrintsItsNote) {
  Plan plan = example();
  plan.source = PlanSource::kManual;
  plan.note = "asked for something else";
  EXPECT_EQ(to_string(plan),
            "sm90/fwd_gather tile 128x256x64 stages 4 grid 132 (manual): asked for something else");
}

TEST(Plan, PrintsThatItsRowsAreGatheredFirst) {
  Plan plan = example();
  plan.gathers_first = true;
  EXPECT_EQ(to_string(plan),
            "sm90/fwd_gather tile 128x256x64 stages 4 grid 132 (heuristic), after its rows are "
            "gathered");
}

TEST(Plan, EveryFieldCountsForEqualityAndHash) {
  std::unordered_set<Plan> plans = {example()};
  const auto add = [&plans](auto change) {
    Plan plan = example();
    change(plan);
    plans.insert(plan);
  };
  add([](Plan& p) { p.backend = BackendKind::kSm80; });
  add([](Plan& p) { p.gathers_first = true; });
  add([](Plan& p) { p.kernel = 8; });
  add([](Plan& p) { p.kernel_name = "fwd"; });
  add([](Plan& p) { p.tile.rows = 64; });
  add([](Plan& p) { p.tile.cols = 128; });
  add([](Plan& p) { p.tile.depth = 32; });
  add([](Plan& p) { p.stages = 3; });
  add([](Plan& p) { p.grid = 131; });
  add([](Plan& p) { p.source = PlanSource::kTuned; });
  add([](Plan& p) { p.note = "why"; });
  EXPECT_EQ(plans.size(), 12u);
  EXPECT_EQ(hash_value(example()), hash_value(example()));
}

}  // namespace
}  // namespace moegemm
