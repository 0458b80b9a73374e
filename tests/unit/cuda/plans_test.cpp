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

/// The second product of Qwen3-30B.
Problem second_product(std::int64_t tokens) {
  Problem problem = weighted_dw("h200");
  problem.op = Op::kForward;
  problem.rows = 8 * tokens;
  problem.multiply = false;
  return problem;
}

TEST(CudaPlans, ProductsOfFewRowsStartBeforeTheLaunchAheadHasEnded) {
  Problem problem = second_product(1);
  EXPECT_EQ(plan(problem).product().start, LaunchStart::kEarly) << to_string(plan(problem));
  problem.rows_pending = true;
  EXPECT_EQ(plan(problem).product().start, LaunchStart::kWithWeights);
  problem.permutation = Permutation::kX;
  EXPECT_EQ(plan(problem).product().start, LaunchStart::kEarly) << "gathered rows have no TMA";
}

TEST(CudaPlans, ProductsOfManyRowsStartEarlyButWaitWithTheirWeights) {
  Problem problem = second_product(8192);
  problem.rows_pending = true;
  EXPECT_EQ(plan(problem).product().start, LaunchStart::kEarly) << to_string(plan(problem));
}

TEST(CudaPlans, MultiprocessorsThatAreLeftToOthersAreNotTakenEarly) {
  Problem problem = second_product(1);
  problem.rows_pending = true;
  problem.max_multiprocessors = 100;
  EXPECT_EQ(plan(problem).product().start, LaunchStart::kAfter) << to_string(plan(problem));
}

TEST(CudaPlans, OnlyHopperStartsEarly) {
  Problem problem = second_product(1);
  problem.rows_pending = true;
  problem.device = *planning_gpu("a100");
  EXPECT_EQ(plan(problem).product().start, LaunchStart::kAfter) << to_string(plan(problem));
}

TEST(CudaPlans, TooManyExpertsAreRefusedForTheirNumberNotForTheirType) {
  Problem problem = second_product(1);
  problem.experts = 40000;
  try {
    plan(problem);
    FAIL() << "planned";
  } catch (const Error& error) {
    const std::string reason = error.what();
    EXPECT_NE(reason.find("sm90: 40000 experts need"), std::string::npos) << reason;
  }
}

TEST(CudaPlans, AmpereDequantisesFirstWhereManyRowsShareWeightsThatFit) {
  Problem problem = second_product(1);
  problem.device = *planning_gpu("a100");
  problem.quantization = {
      .format = WeightFormat::kMxfp4, .scale_type = ScaleType::kE8m0, .block_n = 1, .block_k = 32};
  const auto dequantises = [&](std::int64_t rows_per_expert) {
    problem.rows = rows_per_expert * problem.experts;
    return plan(problem).has(StepKind::kDequantise);
  };
  EXPECT_FALSE(dequantises(128));
  EXPECT_TRUE(dequantises(1024));
  problem.n *= 16;  // W would take more than 4 GiB
  EXPECT_FALSE(dequantises(1024));
}

TEST(CudaPlans, HopperDequantisesFirstWhereManyRowsShareWeightsAndStoresDoNotHide) {
  Problem problem = second_product(1);
  problem.quantization = {
      .format = WeightFormat::kMxfp4, .scale_type = ScaleType::kE8m0, .block_n = 1, .block_k = 32};
  const auto dequantises = [&](std::int64_t rows_per_expert, std::int64_t depth) {
    problem.rows = rows_per_expert * problem.experts;
    problem.k = depth;
    return plan(problem).has(StepKind::kDequantise);
  };
  EXPECT_FALSE(dequantises(128, 768));
  EXPECT_TRUE(dequantises(512, 768));
  EXPECT_FALSE(dequantises(2048, 14336));
}

TEST(CudaPlans, HopperDequantisesFirstWhatIsTooLargeOnlyIfItCanBeCut) {
  Problem problem = second_product(1);
  problem.rows = 2048 * problem.experts;
  problem.k = 768;
  problem.quantization = {
      .format = WeightFormat::kMxfp4, .scale_type = ScaleType::kE8m0, .block_n = 1, .block_k = 32};
  const auto dequantises = [&](int low_rank, std::int64_t gigabytes) {
    problem.low_rank = low_rank;
    const std::int64_t features = (gigabytes << 30) / (problem.experts * problem.k * 2);
    problem.n = features / 64 * 64;
    return plan(problem).has(StepKind::kDequantise);
  };
  for (const std::int64_t gigabytes : {1, 4, 6}) {
    EXPECT_TRUE(dequantises(0, gigabytes)) << gigabytes;
    EXPECT_EQ(dequantises(16, gigabytes), gigabytes <= 4) << gigabytes;
  }
}

TEST(CudaPlans, WeightsThatAPassDecodesAreNotReadBeforeIt) {
  Problem problem = second_product(1);
  problem.rows_pending = true;
  problem.dtype = problem.out_dtype = DType::kFloat16;  // the kernels decode to bf16 only
  problem.quantization = {
      .format = WeightFormat::kMxfp4, .scale_type = ScaleType::kE8m0, .block_n = 1, .block_k = 32};
  const Plan decoded = plan(problem);
  ASSERT_TRUE(decoded.has(StepKind::kDequantise)) << to_string(decoded);
  EXPECT_NE(decoded.product().start, LaunchStart::kWithWeights) << to_string(decoded);
}

}  // namespace
}  // namespace moegemm
