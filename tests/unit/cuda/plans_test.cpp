#include <gtest/gtest.h>

#include <utility>

#include "moegemm/moegemm.h"

/// Whole plans for GPUs that need not be here.
namespace moegemm {
namespace {

Problem weighted_dw(const char* gpu) {
  Problem problem;
  problem.op = Op::kDw;
  problem.experts = 128;
  problem.rows = 65536;
  problem.n = 2048;
  problem.k = 768;
  problem.topk = 8;
  problem.permutation = Permutation::kY;
  problem.multiply = true;
  problem.device = *planning_gpu(gpu);
  return problem;
}

TEST(CudaPlans, WeightedDwIsScaledByAPassAndRunsOnTheBestBackend) {
  for (const auto& [gpu, backend] :
       {std::pair("h200", BackendKind::kSm90), std::pair("a100", BackendKind::kSm80)}) {
    const Plan scaled = plan(weighted_dw(gpu));
    ASSERT_EQ(scaled.steps.size(), 2u) << to_string(scaled);
    EXPECT_EQ(scaled.steps[0].kind, StepKind::kScaleX);
    EXPECT_EQ(scaled.product().backend, backend);
    EXPECT_GE(scaled.workspace_bytes, 65536 * 768 * 2);
  }
}

TEST(CudaPlans, WeightedDwWithoutMemoryGoesToTheKernelThatMultiplies) {
  const Plan whole = plan(weighted_dw("h200"), {}, {}, false);
  ASSERT_EQ(whole.steps.size(), 1u) << to_string(whole);
  EXPECT_EQ(whole.product().backend, BackendKind::kSm80);
  EXPECT_EQ(whole.workspace_bytes, 0);
}

TEST(CudaPlans, AMisalignedXIsNoReasonToLeaveHopper) {
  Problem problem = weighted_dw("h200");
  problem.input_alignment = 2;
  EXPECT_EQ(plan(problem).product().backend, BackendKind::kSm90) << "its scaled copy is aligned";
  problem.dy_alignment = 2;
  EXPECT_EQ(plan(problem).product().backend, BackendKind::kSm80);
}

TEST(CudaPlans, AnActivationThatNoKernelFusesNeedsAWorkspace) {
  Problem problem = weighted_dw("a100");
  problem.op = Op::kForward;
  problem.permutation = Permutation::kX;
  problem.multiply = false;
  problem.activation = Activation{};
  for (const bool memory : {true, false}) {
    const Plan apart = plan(problem, {}, {}, memory);
    EXPECT_TRUE(apart.has(StepKind::kActivate)) << to_string(apart);
    EXPECT_EQ(apart.workspace_bytes, std::int64_t{65536} * 2048 * 2);
  }
}

}  // namespace
}  // namespace moegemm
