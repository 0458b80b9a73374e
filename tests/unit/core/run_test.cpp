#include "core/run.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "core/planning/passes.h"
#include "core/registry.h"

namespace moegemm {
namespace {

/// The reference, which leaves to passes whatever it is told to.
class Delegating final : public Backend {
 public:
  BackendKind kind() const override { return inner_.kind(); }
  std::string unavailable(Device device) const override { return inner_.unavailable(device); }
  std::span<const KernelInfo> kernels() const override { return inner_.kernels(); }
  std::string refuse(const Problem& problem, const KernelInfo& kernel) const override {
    if (problem.activation && !fuses) return "leaves the activation to a pass";
    if (!problem.quantization.plain() && !decodes) return "leaves decoding to a pass";
    return inner_.refuse(problem, kernel);
  }
  Step plan_with(const Problem& problem, int kernel) const override {
    planned = problem;
    return inner_.plan_with(problem, kernel);
  }
  int choose(const Problem& problem) const override { return inner_.choose(problem); }
  bool gathering_first_is_faster(const Problem&) const override { return gathers_first; }
  bool scales_first(const Problem&) const override { return scales; }
  bool aligning_first_is_faster(const Problem&) const override { return aligns_first; }
  void launch(const Step& step, const Problem& problem, const Operands& operands,
              const ExecutionContext& context) const override {
    EXPECT_EQ(problem, planned) << "a product runs with the problem that it was planned for";
    inner_.launch(step, problem, operands, context);
  }

  bool fuses = true;
  bool decodes = true;
  bool gathers_first = false;
  bool scales = false;
  bool aligns_first = false;
  mutable Problem planned;

 private:
  const Backend& inner_ = reference_backend();
};

/// E = 2, M = 6 rows of T = 3 tokens, N = 4, K = 4. The values are small whole numbers and powers
/// of two: every order of the sums has the same bits.
class RunTest : public ::testing::Test {
 protected:
  RunTest() {
    call.problem.dtype = call.problem.out_dtype = DType::kFloat32;
    call.problem.experts = 2;
    call.problem.n = call.problem.k = 4;
    call.problem.rows = kRows;
    call.problem.topk = 2;
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7) - 3;
    for (std::size_t i = 0; i < dy.size(); ++i) dy[i] = static_cast<float>(i % 5) - 2;
    for (std::size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(i % 3) - 1;
    Operands& operands = call.operands;
    operands.x = x.data();
    operands.dy = dy.data();
    operands.w = w.data();
    operands.x_stride = operands.dy_stride = operands.w_stride = operands.out_stride = 4;
    operands.m_sizes = sizes.data();
    operands.gather_indices = indices.data();
    operands.router_weights = weights.data();
    operands.bias = bias.data();
    operands.bias_stride = 4;
  }

  std::vector<float> run(const Backend& backend, std::initializer_list<StepKind> expected) {
    const std::array<const Backend*, 1> backends = {&backend};
    const Planned planned = lower(call.problem, {std::nullopt, std::nullopt}, backends, {});
    std::vector<StepKind> kinds;
    for (const Step& step : planned.plan.steps) kinds.push_back(step.kind);
    EXPECT_EQ(kinds, std::vector<StepKind>(expected)) << to_string(planned.plan);
    std::vector<std::byte> workspace(static_cast<std::size_t>(planned.plan.workspace_bytes));
    std::vector<float> out(32, -7);
    call.operands.out = out.data();
    run_steps(planned, call, workspace.data(), {});
    return out;
  }

  static constexpr int kRows = 6;
  std::vector<float> x = std::vector<float>(kRows * 4);
  std::vector<float> dy = std::vector<float>(kRows * 4);
  std::vector<float> w = std::vector<float>(2 * 4 * 4);
  std::vector<float> bias = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<float> weights = {0.5F, 2, 1, 4, 0.25F, 8};
  std::vector<std::int32_t> sizes = {2, 3};
  std::vector<std::int32_t> indices = {4, 0, 5, 1, 3, 2};
  Call call;
};

/// W in fp8 with a scale for each row, which passes decode.
class RunQuantised : public RunTest {
 protected:
  RunQuantised() {
    constexpr std::array<std::uint8_t, 5> kValues = {0x38, 0xb8, 0x00, 0x40, 0xc4};  // 1 -1 0 2 -3
    for (std::size_t i = 0; i < packed.size(); ++i) packed[i] = kValues[i % 5];
    call.problem.quantization = {WeightFormat::kFp8, ScaleType::kFloat32, 1, 4};
    call.operands.w = packed.data();
    call.operands.w_scales = scales.data();
    backend.decodes = false;
  }

  /// With each pair of features decoded and multiplied by itself.
  std::vector<float> by_pairs() {
    const std::array<const Backend*, 1> backends = {&backend};
    Planned planned = lower(call.problem, {std::nullopt, std::nullopt}, backends, {});
    std::vector<Step> steps;
    for (const std::int64_t first : {0, 2}) {
      for (Step step : planned.plan.steps) {
        step.first_feature = first;
        step.features = 2;
        steps.push_back(step);
      }
    }
    planned.plan.steps = Steps(steps);
    backend.planned = cut_of(product_of(planned.plan, call.problem), 2);
    std::vector<std::byte> workspace(static_cast<std::size_t>(planned.plan.workspace_bytes));
    std::vector<float> out(32, -7);
    call.operands.out = out.data();
    run_steps(planned, call, workspace.data(), {});
    return out;
  }

  Delegating backend;
  std::vector<std::uint8_t> packed = std::vector<std::uint8_t>(2 * 4 * 4);
  std::vector<float> scales = {1, 2, 0.5F, 4, 0.25F, 8, 1, 2};
};

TEST_F(RunQuantised, ProductsOfDecodedPartsAreThatOfTheWhole) {
  call.problem.permutation = Permutation::kX;
  call.problem.bias = true;
  const std::vector<float> forward = run(reference_backend(), {StepKind::kProduct});
  EXPECT_EQ(run(backend, {StepKind::kDequantise, StepKind::kProduct}), forward);
  EXPECT_EQ(by_pairs(), forward);
  call.problem.bias = false;
  call.problem.op = Op::kDx;
  const std::vector<float> dx = run(reference_backend(), {StepKind::kProduct});
  EXPECT_NE(dx, forward);
  EXPECT_EQ(run(backend, {StepKind::kDequantise, StepKind::kProduct}), dx);
  EXPECT_EQ(by_pairs(), dx);
}

TEST_F(RunTest, ScalingAndGatheringFirstAddUpToTheSameDw) {
  call.problem.op = Op::kDw;
  call.problem.permutation = Permutation::kY;
  call.problem.multiply = true;
  const std::vector<float> whole = run(reference_backend(), {StepKind::kProduct});
  Delegating apart;
  apart.scales = true;
  EXPECT_EQ(run(apart, {StepKind::kScaleX, StepKind::kProduct}), whole);
  apart.gathers_first = true;
  EXPECT_EQ(run(apart, {StepKind::kScaleX, StepKind::kGatherDy, StepKind::kProduct}), whole);
  call.problem.dy_per_token = true;
  const std::vector<float> per_token = run(reference_backend(), {StepKind::kProduct});
  EXPECT_NE(per_token, whole);
  EXPECT_EQ(run(apart, {StepKind::kScaleX, StepKind::kGatherDy, StepKind::kProduct}), per_token);
}

TEST_F(RunTest, GatheringTokensFirstAddsUpToTheSameDw) {
  call.problem.op = Op::kDw;
  call.problem.permutation = Permutation::kX;
  const std::vector<float> whole = run(reference_backend(), {StepKind::kProduct});
  Delegating apart;
  apart.gathers_first = true;
  EXPECT_EQ(run(apart, {StepKind::kGatherX, StepKind::kProduct}), whole);
}

TEST_F(RunTest, PaddedInputsAndATrimmedProductAddUpToTheSame) {
  call.problem.n = call.problem.k = 3;
  Delegating apart;
  apart.aligns_first = true;
  const StepKind product = StepKind::kProduct, trim = StepKind::kTrim;
  for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
    call.problem.permutation = permutation;
    call.problem.op = Op::kForward;
    EXPECT_EQ(run(apart, {StepKind::kAlignX, StepKind::kAlignW, product, trim}),
              run(reference_backend(), {product}));
    call.problem.op = Op::kDx;
    EXPECT_EQ(run(apart, {StepKind::kAlignDy, StepKind::kAlignW, product, trim}),
              run(reference_backend(), {product}));
    call.problem.op = Op::kDw;
    EXPECT_EQ(run(apart, {StepKind::kAlignX, StepKind::kAlignDy, product, trim}),
              run(reference_backend(), {product}));
  }
}

/// W of two rows for each expert, and as many in w_up.
TEST_F(RunTest, WeightsInTwoTensorsHaveTheValuesOfOne) {
  std::vector<float> gates, ups;
  for (std::size_t i = 0; i < w.size(); ++i) (i / 8 % 2 == 0 ? gates : ups).push_back(w[i]);
  const StepKind product = StepKind::kProduct;
  for (const bool activated : {false, true}) {
    call.problem.bias = true;
    if (activated) call.problem.activation = Activation{};
    call.operands.out_stride = activated ? 2 : 4;
    call.operands.w = w.data();
    call.problem.ups_apart = false;
    const std::vector<float> one = run(reference_backend(), {product});
    call.operands.w = gates.data();
    call.operands.w_up = ups.data();
    call.problem.ups_apart = true;
    const std::vector<float> two = activated
                                       ? run(Delegating(), {product, product, StepKind::kActivate})
                                       : run(Delegating(), {product, product});
    for (std::size_t i = 0; i < one.size(); ++i) EXPECT_FLOAT_EQ(two[i], one[i]) << i;
  }
}

TEST_F(RunTest, AnActivationApartHasTheValuesOfAFusedOne) {
  call.problem.permutation = Permutation::kX;
  call.problem.bias = true;
  call.problem.activation = Activation{};
  call.operands.out_stride = 2;
  const std::vector<float> fused = run(reference_backend(), {StepKind::kProduct});
  Delegating apart;
  apart.fuses = false;
  const std::vector<float> result = run(apart, {StepKind::kProduct, StepKind::kActivate});
  for (std::size_t i = 0; i < fused.size(); ++i) EXPECT_FLOAT_EQ(result[i], fused[i]) << i;
}

}  // namespace
}  // namespace moegemm
