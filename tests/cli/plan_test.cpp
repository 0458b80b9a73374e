#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/program.h"

namespace moegemm::test {
namespace {

TEST(ProgramPlan, GivesTheSixProductsOfTheLayer) {
  const ProgramResult result = run_program("plan qwen3-30b-a3b --tokens 64 --json");
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto document = result.json();
  EXPECT_EQ(document.at("layer").at("experts"), 128);
  const auto& plans = document.at("plans");
  ASSERT_EQ(plans.size(), 6);
  const auto& first = plans[0].at("problem");
  EXPECT_EQ(first.at("op"), "forward");
  EXPECT_EQ(first.at("n"), 2 * 768);
  EXPECT_EQ(first.at("k"), 2048);
  EXPECT_EQ(first.at("rows"), 64 * 8);
  EXPECT_EQ(first.at("permutation"), "permute_x");
  const auto& last = plans[5].at("problem");
  EXPECT_EQ(last.at("op"), "dW");
  EXPECT_EQ(last.at("n"), 2048);
  EXPECT_EQ(last.at("k"), 768);
  EXPECT_EQ(last.at("permutation"), "permute_y");
  for (const auto& entry : plans) EXPECT_NE(entry.at("plan").at("kernel"), "");
}

TEST(ProgramPlan, GivesEveryLaunchWithItsReason) {
  const auto document = run_program("plan qwen3-30b-a3b --tokens 64 --json").json();
  for (const auto& entry : document.at("plans")) {
    const auto& plan = entry.at("plan");
    EXPECT_GE(plan.at("workspace_bytes"), 0);
    ASSERT_GE(plan.at("steps").size(), 1);
    int products = 0;
    for (const auto& step : plan.at("steps")) {
      EXPECT_NE(step.at("reason"), "");
      if (step.at("kind") != "product") continue;
      ++products;
      EXPECT_EQ(step.at("kernel"), plan.at("kernel"));
      EXPECT_GE(step.at("grid"), 1);
      EXPECT_NE(step.at("order"), "");
    }
    EXPECT_EQ(products, 1);
  }
}

TEST(ProgramPlan, NamesTheLimitAndTheFateOfEveryKernel) {
  const auto document = run_program("plan qwen3-30b-a3b --tokens 64 --json").json();
  for (const auto& entry : document.at("plans")) {
    EXPECT_THAT(entry.at("limit"), ::testing::AnyOf("compute", "memory", "tile loads"));
    EXPECT_GT(entry.at("cost").at("total_us"), 0);
    int chosen = 0;
    for (const auto& candidate : entry.at("candidates")) {
      if (candidate.at("chosen")) ++chosen;
      EXPECT_NE(candidate.at("why"), "");
    }
    EXPECT_EQ(chosen, 1);
  }
}

TEST(ProgramPlan, TextSaysWhyAKernelLost) {
  const ProgramResult result = run_program("plan demo");
  EXPECT_EQ(result.exit_code, 0);
  for (const char* text :
       {"step 1 ", "because: ", "limit  ", "FLOP/s", "B/s", "waves", "chosen: ", "lost: "}) {
    EXPECT_THAT(result.out, ::testing::HasSubstr(text));
  }
}

TEST(ProgramPlan, ForcedBackendIsTheOnePlanned) {
  const auto document = run_program("plan --backend reference --json").json();
  for (const auto& entry : document.at("plans")) {
    EXPECT_EQ(entry.at("plan").at("backend"), "reference");
  }
}

}  // namespace
}  // namespace moegemm::test
