#include "core/planning/cost.h"

#include <gtest/gtest.h>

#include "moegemm/moegemm.h"

namespace moegemm {
namespace {

/// An H200 in round numbers.
constexpr MachineLimits kMachine = {7e14, 4.3e12, 1.25e13, 132, 4};

KernelInfo row_gemm(int rows, int cols) {
  return {BackendKind::kSm90, "k", Op::kForward, {rows, cols, 64}, 4};
}

/// The first GEMM of Qwen3-30B-A3B.
Problem layer(std::int64_t tokens) {
  Problem problem;
  problem.experts = 128;
  problem.n = 1536;
  problem.k = 2048;
  problem.topk = 8;
  problem.rows = tokens * 8;
  problem.permutation = Permutation::kX;
  return problem;
}

TEST(Cost, ManyTokensAreBoundByComputeAndFewByMemory) {
  const CostEstimate many = estimate_cost(layer(8192), row_gemm(160, 256), kMachine);
  EXPECT_STREQ(many.limit(), "compute");
  EXPECT_NEAR(many.total_us, 670, 130);  // measured on an H200: 673
  const CostEstimate few = estimate_cost(layer(64), row_gemm(64, 128), kMachine);
  EXPECT_STREQ(few.limit(), "memory");
  EXPECT_NEAR(few.total_us, 196, 20);  // measured: 196
}

TEST(Cost, OneTokenReadsOnlyTheWeightsOfItsExperts) {
  const double one = estimate_cost(layer(1), row_gemm(64, 128), kMachine).bytes;
  EXPECT_NEAR(one, 8.0 * 1536 * 2048 * 2, 0.05 * one);
}

TEST(Cost, WiderTilesThanTheOutputPadIt) {
  Problem narrow = layer(8192);
  narrow.n = 128;
  EXPECT_GT(estimate_cost(narrow, row_gemm(128, 256), kMachine).compute_us,
            1.9 * estimate_cost(narrow, row_gemm(128, 128), kMachine).compute_us);
}

TEST(Cost, WeightGradientIsWrittenForEveryExpert) {
  Problem problem = layer(1);
  problem.op = Op::kDw;
  const KernelInfo kernel = {BackendKind::kSm90, "k", Op::kDw, {256, 192, 32}, 6};
  const CostEstimate cost = estimate_cost(problem, kernel, kMachine);
  EXPECT_STREQ(cost.limit(), "memory");
  EXPECT_NEAR(cost.bytes, 128.0 * 1536 * 2048 * 2, 0.05 * cost.bytes);
  problem.accumulate = true;
  EXPECT_GT(estimate_cost(problem, kernel, kMachine).bytes, 1.9 * cost.bytes);
}

TEST(Cost, UnknownMachinePredictsNothingButCountsWork) {
  const CostEstimate cost = estimate_cost(layer(64), row_gemm(64, 128), {});
  EXPECT_EQ(cost.total_us, 0);
  EXPECT_GT(cost.flops, 0);
  EXPECT_GT(cost.bytes, 0);
}

TEST(Cost, NothingToDoCostsALaunch) {
  EXPECT_LE(estimate_cost(layer(0), row_gemm(64, 128), kMachine).total_us, 5);
}

TEST(Explain, EveryKernelOfTheOpIsThereWithAReasonAndOneIsChosen) {
  Problem problem = layer(16);
  for (const Op op : {Op::kForward, Op::kDx, Op::kDw}) {
    problem.op = op;
    const PlanExplanation explained = explain(problem);
    EXPECT_EQ(explained.plan, plan(problem));
    int chosen = 0;
    for (const PlanCandidate& candidate : explained.candidates) {
      EXPECT_EQ(candidate.kernel.op, op);
      EXPECT_NE(candidate.remark, "");
      if (!candidate.chosen) continue;
      ++chosen;
      EXPECT_EQ(candidate.kernel.name, explained.plan.product().kernel_name);
    }
    EXPECT_EQ(chosen, 1);
  }
}

TEST(Explain, RefusedKernelCarriesItsReason) {
  Problem problem = layer(16);
  problem.op = Op::kDw;
  problem.out_dtype = DType::kFloat32;
  problem.accumulate = true;
  const PlanExplanation explained = explain(problem, BackendKind::kCpu);
  int refused = 0;
  for (const PlanCandidate& candidate : explained.candidates) {
    if (candidate.refused.empty()) continue;
    ++refused;
    EXPECT_EQ(candidate.remark, candidate.refused);
  }
  EXPECT_EQ(refused, 1);  // the kernel that does not read its output
}

}  // namespace
}  // namespace moegemm
