#include "moegemm/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cli/program.h"
#include "moegemm/info.h"

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

bool has_cuda_kernels() {
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.backend == BackendKind::kSm80) return true;
  }
  return false;
}

TEST(ProgramPlan, NamedGpuNeedNotBeHere) {
  if (!has_cuda_kernels()) GTEST_SKIP() << "no CUDA kernels are compiled in";
  for (const std::string& name : planning_gpus()) {
    const std::string hopper = name[0] == 'h' ? "sm90" : "sm80";
    const ProgramResult result =
        run_program("plan qwen3-30b-a3b --tokens 8192 --json --gpu " + name);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const auto document = result.json();
    ASSERT_EQ(document.at("plans").size(), 6u);
    for (const auto& entry : document.at("plans")) {
      EXPECT_EQ(entry.at("plan").at("backend"), hopper) << name;
      EXPECT_GT(entry.at("cost").at("total_us"), 0) << name;
      EXPECT_EQ(entry.at("problem").at("device"), "cuda (" + name + ")");
    }
  }
}

TEST(ProgramPlan, NamedGpuWithoutCudaKernelsIsRefused) {
  if (has_cuda_kernels()) GTEST_SKIP() << "CUDA kernels are compiled in";
  const ProgramResult result = run_program("plan --gpu h200");
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, ::testing::HasSubstr("--gpu h200: no CUDA kernels are compiled in"));
}

TEST(ProgramPlan, CudaWithoutAGpuOffersTheNamedOnes) {
  std::string why_none;
  if (!gpus(&why_none).empty()) GTEST_SKIP() << "this machine has a GPU";
  const ProgramResult result = run_program("plan --device cuda");
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, ::testing::HasSubstr(why_none));
  EXPECT_THAT(result.err, ::testing::HasSubstr("--gpu plans for one that is not here: h200, "));
}

}  // namespace
}  // namespace moegemm::test
