#include "core/planning/lower.h"

#include <gtest/gtest.h>

#include <array>

#include "core/planning/passes.h"
#include "unit/core/expect_refusal.h"
#include "unit/core/planning/fake_backend.h"

namespace moegemm {
namespace {

using testing::expect_refusal;
using testing::FakeBackend;

class LowerTest : public ::testing::Test {
 protected:
  LowerTest() {
    problem.experts = 4;
    problem.n = 1024;
    problem.k = 64;
    problem.rows = 100;
    problem.topk = 2;
  }

  Planned lowered(WorkspaceUse workspace = WorkspaceUse::kFree, const char* kernel = "",
                  std::optional<BackendKind> backend = {}) const {
    std::optional<KernelConfig> config;
    if (*kernel != 0) config.emplace().kernel = kernel;
    return lower(problem, {backend, config, false, workspace}, backends, {});
  }

  Planned tuned(const char* kernel, WorkspaceUse workspace = WorkspaceUse::kFree) const {
    return lower(problem, {std::nullopt, std::nullopt, true, workspace}, backends,
                 [kernel](const Problem&, const Backend&) { return kernel; });
  }

  void ask_for_weighted_dw() {
    problem.op = Op::kDw;
    problem.permutation = Permutation::kY;
    problem.multiply = true;
  }

  static std::vector<StepKind> kinds(const Plan& plan) {
    std::vector<StepKind> list;
    for (const Step& step : plan.steps) {
      EXPECT_NE(step.reason, "") << to_string(step);
      list.push_back(step.kind);
    }
    return list;
  }

  using Kinds = std::vector<StepKind>;
  static inline const Kinds kWhole = {StepKind::kProduct};
  static inline const Kinds kActivated = {StepKind::kProduct, StepKind::kActivate};
  static inline const Kinds kScaled = {StepKind::kScaleX, StepKind::kProduct};

  FakeBackend fast{BackendKind::kCpu,
                   {{BackendKind::kCpu, "fast_dw", Op::kDw, {16, 16, 16}, 1},
                    {BackendKind::kCpu, "fast_64", Op::kForward, {64, 64, 32}, 2},
                    {BackendKind::kCpu, "fast_128", Op::kForward, {128, 128, 32}, 4}}};
  FakeBackend plain{BackendKind::kReference,
                    {{BackendKind::kReference, "plain", Op::kForward, {1, 1, 1}, 1},
                     {BackendKind::kReference, "plain_dw", Op::kDw, {1, 1, 1}, 1}}};
  std::array<const Backend*, 2> backends = {&fast, &plain};
  Problem problem;
};

TEST_F(LowerTest, APlainProductIsOneStepWithoutWorkspace) {
  const Plan plan = lowered().plan;
  EXPECT_EQ(kinds(plan), kWhole);
  EXPECT_EQ(plan.workspace_bytes, 0);
  EXPECT_EQ(plan.product().workspace_offset, -1);
}

TEST_F(LowerTest, InputsThatAreNotAlignedAreCopiedWhereThatIsFaster) {
  problem.k = 63;
  EXPECT_EQ(kinds(lowered().plan), kWhole);
  fast.aligns_first = true;
  const Plan plan = lowered().plan;
  EXPECT_EQ(kinds(plan), (Kinds{StepKind::kAlignX, StepKind::kAlignW, StepKind::kProduct}));
  EXPECT_EQ(plan.workspace_bytes, 100 * 64 * 2 + 4 * 1024 * 64 * 2);
  EXPECT_EQ(product_of(plan, problem).k, 64);
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kNeeded).plan), kWhole) << "it only saves time";
  problem.k = 64;
  EXPECT_EQ(kinds(lowered().plan), kWhole);
}

TEST_F(LowerTest, AProductOfPaddedInputsIsTrimmedWhereTheOutputIsSmaller) {
  fast.aligns_first = true;
  problem.n = 1021;
  const Plan plan = lowered().plan;
  EXPECT_EQ(kinds(plan),
            (Kinds{StepKind::kAlignX, StepKind::kAlignW, StepKind::kProduct, StepKind::kTrim}));
  EXPECT_GE(plan.product().workspace_offset, 0);
  EXPECT_EQ(product_of(plan, problem).n, 1024);
  problem.op = Op::kDw;
  EXPECT_EQ(kinds(lowered().plan),
            (Kinds{StepKind::kAlignX, StepKind::kAlignDy, StepKind::kProduct, StepKind::kTrim}));
}

TEST_F(LowerTest, WhatPassesCannotAlignIsLeftAsItIs) {
  fast.aligns_first = true;
  problem.n = 1021;
  problem.bias = true;
  EXPECT_EQ(kinds(lowered().plan), kWhole) << "a bias is as wide as the output";
  problem.bias = false;
  problem.tails = Tails::kUndefined;
  EXPECT_EQ(kinds(lowered().plan), kWhole) << "copies would read what nobody may";
  problem.tails = Tails::kZero;
  problem.expected_rows = problem.rows / 8;
  EXPECT_EQ(kinds(lowered().plan), kWhole) << "copies would be of the whole capacity";
}

TEST_F(LowerTest, AProductAfterAPassDoesNotFollowTheLaunchAheadOfTheCall) {
  problem.rows_pending = true;
  lowered();
  EXPECT_TRUE(fast.planned_rows_pending);
  problem.k = 63;
  fast.aligns_first = true;
  lowered();
  EXPECT_FALSE(fast.planned_rows_pending) << "what writes its rows is the pass before it";
}

TEST_F(LowerTest, TwoTensorsOfWeightsTakeAProductEachWhereNoKernelReadsBoth) {
  problem.ups_apart = true;
  const Plan plan = lowered().plan;
  EXPECT_EQ(kinds(plan), (Kinds{StepKind::kProduct, StepKind::kProduct}));
  EXPECT_EQ(plan.steps[0].columns, Columns::kFirstHalf);
  EXPECT_EQ(plan.steps[1].columns, Columns::kSecondHalf);
  EXPECT_EQ(product_of(plan, problem).n, 512);
  EXPECT_NE(to_string(plan).find("second half"), std::string::npos) << to_string(plan);
  problem.activation = Activation{};
  const Plan activated = lowered().plan;
  EXPECT_EQ(kinds(activated), (Kinds{StepKind::kProduct, StepKind::kProduct, StepKind::kActivate}));
  EXPECT_EQ(activated.workspace_bytes, 100 * 1024 * 2);
}

TEST_F(LowerTest, AKernelReadsBothTensorsOfWeightsWhereOneMapSpansThem) {
  FakeBackend both{BackendKind::kCpu,
                   {{BackendKind::kCpu, "apart", Op::kForward, {64, 64, 32}, 2},
                    {.backend = BackendKind::kCpu,
                     .name = "both",
                     .op = Op::kForward,
                     .tile = {64, 64, 32},
                     .stages = 2,
                     .ups_apart = true}}};
  both.fusing_kernel = "both";
  backends[0] = &both;
  problem.ups_apart = true;
  problem.activation = Activation{};
  EXPECT_EQ(lowered().plan.steps.size(), 3U) << "they lie anywhere";
  problem.ups_follow = true;
  EXPECT_EQ(kinds(lowered().plan), kWhole);
  EXPECT_EQ(lowered().plan.product().kernel_name, "both");
}

class LowerQuantised : public LowerTest {
 protected:
  LowerQuantised() { problem.quantization = {WeightFormat::kMxfp4, ScaleType::kE8m0, 1, 32}; }

  static inline const Kinds kDecoded = {StepKind::kDequantise, StepKind::kProduct};
  FakeBackend decoding{BackendKind::kCpu,
                       {{BackendKind::kCpu, "plain_64", Op::kForward, {64, 64, 32}, 2},
                        {.backend = BackendKind::kCpu,
                         .name = "mxfp4_64",
                         .op = Op::kForward,
                         .tile = {64, 64, 32},
                         .stages = 2,
                         .weights = WeightFormat::kMxfp4},
                        {.backend = BackendKind::kCpu,
                         .name = "mxfp4_any_order",
                         .op = Op::kForward,
                         .tile = {16, 64, 32},
                         .stages = 2,
                         .weights = WeightFormat::kMxfp4,
                         .own_order = true}}};
};

TEST_F(LowerQuantised, WeightsThatNoKernelDecodesAreDecodedByAPass) {
  const Plan plan = lowered().plan;
  EXPECT_EQ(kinds(plan), kDecoded);
  EXPECT_EQ(plan.workspace_bytes, 4 * 1024 * 64 * 2);
  EXPECT_EQ(plan.steps[0].workspace_offset, 0);
  EXPECT_NE(plan.steps[0].reason.find("mxfp4"), std::string::npos);
  EXPECT_TRUE(product_of(plan, problem).quantization.plain());
  problem.activation = Activation{};
  EXPECT_EQ(kinds(lowered().plan),
            (Kinds{StepKind::kDequantise, StepKind::kProduct, StepKind::kActivate}));
}

TEST_F(LowerQuantised, LargeWeightsAreDecodedAndMultipliedByFeatures) {
  problem.experts = 128;
  problem.n = 5760;
  problem.k = 2880;
  const Plan plan = lowered().plan;
  ASSERT_EQ(plan.steps.size(), 10U) << "five cuts: 1 GiB holds 1456 features";
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(plan.steps[i].kind, kDecoded[i % 2]);
    EXPECT_EQ(plan.steps[i].first_feature, i / 2 * 1152);
    EXPECT_EQ(plan.steps[i].features, 1152);
  }
  EXPECT_EQ(plan.workspace_bytes, std::int64_t{128} * 1152 * 2880 * 2);
  EXPECT_EQ(product_of(plan, problem).n, 5760);
  EXPECT_NE(to_string(plan).find("features 1152 to 2303"), std::string::npos) << to_string(plan);
  Problem other = problem;
  other.op = Op::kDx;
  EXPECT_EQ(features_at_a_time(other), 576) << "of K, which has 45 chunks";
  EXPECT_EQ(cut_of(other, 576).k, 576);
  problem.n = 5761;
  EXPECT_EQ(kinds(lowered().plan), kDecoded) << "there are no equal cuts of it";
}

TEST_F(LowerQuantised, WhatIsCutIsActivatedAfterItsLastPart) {
  problem.experts = 128;
  problem.n = 5760;
  problem.k = 2880;
  problem.activation = Activation{};
  fast.fusing_kernel = "fast_128";
  const Plan plan = lowered().plan;
  ASSERT_EQ(plan.steps.size(), 11U);
  EXPECT_EQ(plan.steps[10].kind, StepKind::kActivate);
  EXPECT_EQ(plan.product().workspace_offset, std::int64_t{128} * 1152 * 2880 * 2);
  EXPECT_EQ(plan.workspace_bytes - plan.product().workspace_offset, 100 * 5760 * 2);
}

TEST_F(LowerQuantised, AKernelThatDecodesNeedsNoPass) {
  backends = {&decoding, &plain};
  const Plan plan = lowered().plan;
  EXPECT_EQ(kinds(plan), kWhole);
  EXPECT_EQ(plan.product().kernel_name, "mxfp4_64");
  EXPECT_EQ(plan.workspace_bytes, 0);
  // It decodes one format.
  problem.quantization = {WeightFormat::kInt4, ScaleType::kBFloat16, 1, 32};
  EXPECT_EQ(kinds(lowered().plan), kDecoded);
  EXPECT_EQ(lowered().plan.product().kernel_name, "plain_64");
}

TEST_F(LowerQuantised, APassThatIsFasterTakesFreeMemoryOnly) {
  backends = {&decoding, &plain};
  decoding.dequantises_first = true;
  EXPECT_EQ(kinds(lowered().plan), kDecoded);
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kNeeded).plan), kWhole);
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kAvoid).plan), kWhole);
}

TEST_F(LowerQuantised, APlainKernelByNameReadsDecodedWeights) {
  backends = {&decoding, &plain};
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kFree, "plain_64").plan), kDecoded);
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kFree, "mxfp4_64").plan), kWhole);
}

TEST_F(LowerQuantised, AKernelWithAnOrderOfItsOwnIsAskedForByTheProblem) {
  backends = {&decoding, &plain};
  expect_refusal(ErrorKind::kInvalidValue, {"mxfp4_any_order", "order of its own"},
                 [this] { lowered(WorkspaceUse::kFree, "mxfp4_any_order"); });
  problem.batch_invariant = false;
  EXPECT_EQ(lowered(WorkspaceUse::kFree, "mxfp4_any_order").plan.product().kernel_name,
            "mxfp4_any_order");
}

TEST_F(LowerTest, AnActivationThatNoKernelAppliesIsAPassAfterTheProduct) {
  problem.activation = Activation{};
  problem.bias = true;
  problem.out_dtype = DType::kFloat32;
  const Planned planned = lowered();
  EXPECT_EQ(planned.backend, &fast);
  EXPECT_EQ(planned.plan.product().kernel_name, "fast_64");
  EXPECT_EQ(kinds(planned.plan), kActivated);
  EXPECT_EQ(planned.plan.product().workspace_offset, 0);
  EXPECT_EQ(planned.plan.workspace_bytes, 100 * 1024 * 2);
  const Problem product = product_of(planned.plan, problem);
  EXPECT_EQ(product.out_dtype, DType::kBFloat16) << "rows of the inputs' dtype are activated";
  EXPECT_FALSE(product.bias) << "the pass adds it";
}

TEST_F(LowerTest, AKernelThatAppliesTheActivationIsTaken) {
  problem.activation = Activation{};
  fast.fusing_kernel = "fast_128";
  const Plan plan = lowered().plan;
  EXPECT_EQ(plan.product().kernel_name, "fast_128");
  EXPECT_EQ(kinds(plan), kWhole);
}

TEST_F(LowerTest, ALesserBackendsFusionDoesNotMakeUpForItsProduct) {
  problem.activation = Activation{};
  plain.fusing_kernel = "plain";
  EXPECT_EQ(lowered().backend, &fast);
  EXPECT_EQ(kinds(lowered().plan), kActivated);
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kFree, "", BackendKind::kReference).plan), kWhole);
}

TEST_F(LowerTest, AnActivationApartIsTakenWhereThatIsFasterUnlessAKernelIsAskedFor) {
  problem.activation = Activation{};
  fast.fusing_kernel = "fast_128";
  fast.fuses_faster = false;
  EXPECT_EQ(kinds(lowered().plan), kActivated);
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kFree, "fast_128").plan), kWhole);
  const Plan apart = lowered(WorkspaceUse::kFree, "fast_64").plan;
  EXPECT_EQ(kinds(apart), kActivated);
  EXPECT_EQ(apart.product().kernel_name, "fast_64");
}

TEST_F(LowerTest, WorkspaceThatOnlySavesTimeIsLeftOutWhereThereIsNone) {
  problem.activation = Activation{};
  fast.fusing_kernel = "fast_128";
  fast.fuses_faster = false;
  for (const WorkspaceUse use : {WorkspaceUse::kAvoid, WorkspaceUse::kNeeded}) {
    const Plan plan = lowered(use).plan;
    EXPECT_EQ(kinds(plan), kWhole);
    EXPECT_EQ(plan.product().kernel_name, "fast_128");
    EXPECT_EQ(plan.workspace_bytes, 0);
  }
  fast.fusing_kernel.clear();
  EXPECT_GT(lowered(WorkspaceUse::kAvoid).plan.workspace_bytes, 0) << "nothing runs without it";
}

TEST_F(LowerTest, GathersTheRowsOfDwFirstWhereThatIsFaster) {
  problem.permutation = Permutation::kX;
  problem.op = Op::kDw;
  EXPECT_EQ(kinds(lowered().plan), kWhole);
  fast.gathers_first = true;
  const Plan plan = lowered().plan;
  EXPECT_EQ(kinds(plan), (Kinds{StepKind::kGatherX, StepKind::kProduct}));
  EXPECT_EQ(plan.steps[0].workspace_offset, 0);
  EXPECT_EQ(plan.workspace_bytes, 100 * 64 * 2);
  EXPECT_TRUE(product_of(plan, problem).presorted);
  EXPECT_FALSE(product_of(plan, problem).gathers());
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kNeeded).plan), kWhole);
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kAvoid).plan), kWhole);
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kFree, "fast_dw").plan), kWhole);
  problem.permutation = Permutation::kY;
  problem.dy_per_token = true;
  EXPECT_EQ(kinds(lowered().plan), (Kinds{StepKind::kGatherDy, StepKind::kProduct}));
  EXPECT_FALSE(product_of(lowered().plan, problem).dy_per_token);
  problem.permutation = Permutation::kNone;
  problem.dy_per_token = false;
  EXPECT_EQ(kinds(lowered().plan), kWhole);
  problem.permutation = Permutation::kX;
  problem.op = Op::kForward;
  EXPECT_EQ(kinds(lowered().plan), kWhole);
}

TEST_F(LowerTest, WeightedDwIsScaledBeforeABackendThatDoesNotMultiply) {
  ask_for_weighted_dw();
  EXPECT_EQ(kinds(lowered().plan), kWhole) << "its kernel multiplies";
  fast.multiplies = false;
  const Planned planned = lowered();
  EXPECT_EQ(planned.backend, &fast) << "no lesser backend because of a multiplication";
  EXPECT_EQ(kinds(planned.plan), kScaled);
  EXPECT_EQ(planned.plan.workspace_bytes, 100 * 64 * 2 + 512)
      << "X, and a dot product for each row";
  const Problem product = product_of(planned.plan, problem);
  EXPECT_FALSE(product.multiply);
  EXPECT_EQ(product.permutation, Permutation::kY);
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kNeeded).plan), kScaled);
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kFree, "fast_dw").plan), kScaled);
}

TEST_F(LowerTest, WeightedDwWithoutMemoryGoesToWhoeverMultiplies) {
  ask_for_weighted_dw();
  fast.multiplies = false;
  const Planned planned = lowered(WorkspaceUse::kAvoid);
  EXPECT_EQ(planned.backend, &plain);
  EXPECT_EQ(kinds(planned.plan), kWhole);
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kAvoid, "", BackendKind::kCpu).plan), kScaled)
      << "the one that was asked for cannot do without";
}

TEST_F(LowerTest, WeightedDwOfADeviceIsRoundedTheSameWayWhoeverRunsIt) {
  ask_for_weighted_dw();
  fast.scales = plain.scales = true;
  EXPECT_EQ(kinds(lowered().plan), kScaled) << "although its kernel could multiply";
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kNeeded).plan), kScaled)
      << "want of memory changes no bits";
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kFree, "plain_dw").plan), kScaled);
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kAvoid).plan), kWhole);
}

TEST_F(LowerTest, WeightedAndGatheredDwHasBothPassesInTurn) {
  ask_for_weighted_dw();
  fast.multiplies = false;
  fast.gathers_first = true;
  const Plan plan = lowered().plan;
  EXPECT_EQ(kinds(plan), (Kinds{StepKind::kScaleX, StepKind::kGatherDy, StepKind::kProduct}));
  EXPECT_EQ(plan.steps[1].workspace_offset, 100 * 64 * 2 + 512);
  EXPECT_EQ(plan.workspace_bytes, 100 * 64 * 2 + 512 + 100 * 1024 * 2);
  EXPECT_EQ(kinds(lowered(WorkspaceUse::kNeeded).plan), kScaled) << "the copy only saves time";
}

TEST_F(LowerTest, AScaledCopyOfAMisalignedXIsAligned) {
  ask_for_weighted_dw();
  fast.multiplies = false;
  problem.input_alignment = 2;
  EXPECT_EQ(product_of(lowered().plan, problem).input_alignment, 16);
  problem.dy_alignment = 4;
  EXPECT_EQ(product_of(lowered().plan, problem).input_alignment, 4);
  problem.dy_alignment = 16;
  problem.k = 65;
  EXPECT_EQ(product_of(lowered().plan, problem).input_alignment, 2);
}

TEST_F(LowerTest, AMeasuredKernelComesWithThePassesThatItTakes) {
  problem.activation = Activation{};
  fast.fusing_kernel = "fast_128";
  const Plan apart = tuned("fast_64").plan;
  EXPECT_EQ(kinds(apart), kActivated);
  EXPECT_EQ(apart.source, PlanSource::kTuned);
  EXPECT_EQ(kinds(tuned("fast_128").plan), kWhole);
  for (const WorkspaceUse use : {WorkspaceUse::kAvoid, WorkspaceUse::kNeeded}) {
    const Plan spare = tuned("fast_64", use).plan;
    EXPECT_EQ(spare.product().kernel_name, "fast_128") << "no memory for the measured one";
    EXPECT_EQ(spare.source, PlanSource::kTuned) << "nothing is left to be measured";
  }
}

TEST_F(LowerTest, AProblemWithoutRowsNeedsNoWorkspace) {
  problem.activation = Activation{};
  problem.rows = 0;
  EXPECT_EQ(kinds(lowered().plan), kActivated);
  EXPECT_EQ(lowered().plan.workspace_bytes, 0);
}

TEST_F(LowerTest, ARefusalSaysWhatIsWrongWithTheProductNotWhatAPassWouldDo) {
  problem.activation = Activation{};
  problem.n = 8;
  plain.unavailable_reason = "asleep";
  expect_refusal(ErrorKind::kNotImplemented, {"cpu: N = 8 is too narrow", "reference: asleep"},
                 [&] { lowered(); });
}

}  // namespace
}  // namespace moegemm
