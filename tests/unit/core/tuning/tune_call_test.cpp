#include "core/tuning/tune_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <stdexcept>
#include <vector>

#include "core/planning/kernel_step.h"
#include "core/tuning/cache/bucket.h"
#include "core/tuning/cache/kernel_sources.h"
#include "unit/core/tuning/measure/fake_stopwatch.h"
#include "unit/core/tuning/measure/host_support.h"

namespace moegemm {
namespace {

using testing::FakeStopwatch;
using ::testing::HasSubstr;
using testing::HostSupport;

/// Three forward kernels: the heuristic takes the first, `odd` refuses even N.
class ThreeKernels final : public Backend {
 public:
  BackendKind kind() const override { return BackendKind::kCpu; }
  std::string unavailable(Device) const override { return {}; }
  std::span<const KernelInfo> kernels() const override { return list; }
  std::string refuse(const Problem& problem, const KernelInfo& kernel) const override {
    if (kernel.name == "odd" && problem.n % 2 == 0) return "N is even";
    return {};
  }
  Step plan_with(const Problem&, int kernel) const override {
    return kernel_step(list[kernel], kernel, 1);
  }
  int choose(const Problem&) const override { return 1; }
  MachineLimits limits(const Problem&) const override { return machine; }
  void launch(const Step& step, const Problem&, const Operands& operands,
              const ExecutionContext&) const override {
    launched.push_back(operands);
    if (stopwatch != nullptr) stopwatch->next_us = us.at(step.kernel_name);
  }

  MachineLimits machine;
  FakeStopwatch* stopwatch = nullptr;
  std::map<std::string, double> us;
  mutable std::vector<Operands> launched;
  std::vector<KernelInfo> list = {
      {BackendKind::kCpu, "huge", Op::kForward, {1024, 1024, 32}, 1},
      {BackendKind::kCpu, "default", Op::kForward, {64, 64, 32}, 1},
      {BackendKind::kCpu, "other", Op::kForward, {128, 64, 32}, 1},
      {BackendKind::kCpu, "odd", Op::kForward, {64, 32, 32}, 1},
      {BackendKind::kCpu, "dw", Op::kDw, {64, 32, 32}, 1},
  };
};

class TuneTest : public ::testing::Test {
 protected:
  TuneTest() {
    call.problem.experts = 4;
    call.problem.n = 256;
    call.problem.k = 128;
    call.problem.rows = 256;
    call.operands.x = x.data();
    call.operands.x_stride = 128;
    call.operands.w = w.data();
    call.operands.w_stride = 128;
    call.operands.out = y.data();
    call.operands.out_stride = 256;
    call.operands.m_sizes = m_sizes.data();
    backend.stopwatch = &stopwatch;
    context.tuning = &support;
  }

  TuneReport run(const std::map<std::string, double>& us, std::int64_t cache_bytes = 1) {
    backend.us = us;
    const TuneField field = choose();
    auto rotation = OperandRotation::borrow(call, field.workspace_bytes(),
                                            {2 * cache_bytes, cache_bytes}, context, support);
    return measure(backend, call.problem, field, *rotation, stopwatch, context);
  }

  TuneField choose(WorkspaceUse workspace = WorkspaceUse::kFree) const {
    const std::array<const Backend*, 1> only = {&backend};
    const Plan first =
        lower(call.problem, {std::nullopt, std::nullopt, false, workspace}, only, {}).plan;
    return choose_field(backend, call.problem, first.product().kernel, workspace);
  }

  static const TuneCandidate& find(const TuneReport& report, const std::string& name) {
    for (const TuneCandidate& candidate : report.candidates) {
      if (candidate.kernel == name) return candidate;
    }
    throw std::out_of_range(name);
  }

  ThreeKernels backend;
  FakeStopwatch stopwatch;
  HostSupport support;
  ExecutionContext context;
  Call call;
  std::vector<std::uint16_t> x = std::vector<std::uint16_t>(256 * 128);
  std::vector<std::uint16_t> w = std::vector<std::uint16_t>(std::size_t{4} * 256 * 128);
  std::vector<std::uint16_t> y = std::vector<std::uint16_t>(std::size_t{256} * 256);
  std::vector<std::int32_t> m_sizes = {64, 64, 64, 64};
};

TEST_F(TuneTest, FieldHasTheHeuristicsKernelFirstAndTheRefusedWithTheirReason) {
  const TuneField field = choose();
  ASSERT_EQ(field.plans.size(), 3u);
  EXPECT_EQ(field.plans.front().product().kernel, 1);
  ASSERT_EQ(field.candidates.size(), 4u);
  EXPECT_EQ(field.candidates.back().kernel, "odd");
  EXPECT_EQ(field.candidates.back().outcome, "refused: N is even");
}

TEST_F(TuneTest, CostModelPrunesTheHopeless) {
  backend.machine = {1e12, 1e12, 0, 4, 1};
  call.problem.rows = 65536;
  call.problem.n = 64;  // a tile of 1024 columns pads it sixteenfold
  call.problem.k = 4096;
  const TuneField field = choose();
  for (const Plan& plan : field.plans) EXPECT_NE(plan.product().kernel, 0);
  EXPECT_THAT(field.candidates.back().outcome, HasSubstr("pruned: predicted"));
}

TEST_F(TuneTest, FastestKernelIsReported) {
  const TuneReport report = run({{"huge", 500}, {"default", 100}, {"other", 80}});
  EXPECT_TRUE(report.measured);
  EXPECT_EQ(report.plan.product().kernel_name, "other");
  EXPECT_EQ(report.plan.source, PlanSource::kTuned);
  EXPECT_EQ(find(report, "other").outcome, "fastest");
  EXPECT_EQ(find(report, "huge").outcome, "given up: too slow");
  EXPECT_EQ(find(report, "default").median_us, 100);
}

/// Whatever kernel is next, a launch finds nothing of its operands in a cache of a megabyte.
TEST_F(TuneTest, LaunchesTakeSetsOfOperandsInTurn) {
  const std::int64_t cache = 1 << 20;
  const TuneReport report = run({{"huge", 100}, {"default", 100}, {"other", 100}}, cache);
  const std::int64_t touched = 2 * (256 * 128 + 4 * 256 * 128 + 256 * 256);
  const int sets = report.operand_sets;
  EXPECT_GE(sets * touched, 2 * cache);
  EXPECT_FALSE(report.flushed);
  EXPECT_GE(report.memory_bytes, 2 * cache - touched);
  ASSERT_EQ(backend.launched.size(), 3u * 16) << "three kernels, one warm-up and 15 rounds";
  for (std::size_t i = 0; i < backend.launched.size(); ++i) {
    const Operands& now = backend.launched[i];
    EXPECT_NE(now.out, y.data());
    for (std::size_t j = i - std::min<std::size_t>(i, sets - 1); j < i; ++j) {
      EXPECT_NE(now.x, backend.launched[j].x) << i << " and " << j;
      EXPECT_NE(now.w, backend.launched[j].w) << i << " and " << j;
      EXPECT_NE(now.out, backend.launched[j].out) << i << " and " << j;
    }
  }
}

TEST_F(TuneTest, MemoryThatIsShortIsReportedAsFlushing) {
  support.most_bytes = 1 << 20;
  const TuneReport report = run({{"huge", 100}, {"default", 100}, {"other", 100}}, 1 << 20);
  EXPECT_EQ(report.operand_sets, 1);
  EXPECT_TRUE(report.flushed);
  EXPECT_EQ(report.memory_bytes, 2 * 256 * 256 + (1 << 20));
}

TEST_F(TuneTest, InterruptionAfterTwoKernelsKeepsTheBetter) {
  support.stop_after = 5;  // three untimed launches, two timed
  const TuneReport report = run({{"huge", 80}, {"default", 100}, {"other", 500}});
  EXPECT_TRUE(report.interrupted);
  EXPECT_TRUE(report.measured);
  EXPECT_EQ(report.plan.product().kernel_name, "huge");
  EXPECT_EQ(find(report, "other").outcome, "not reached");
}

TEST_F(TuneTest, InterruptionBeforeAnyComparisonDecidesNothing) {
  support.stop_after = 4;
  const TuneReport report = run({{"huge", 500}, {"default", 100}, {"other", 80}});
  EXPECT_TRUE(report.interrupted);
  EXPECT_FALSE(report.measured);
  EXPECT_EQ(report.plan.product().kernel_name, "default");
  EXPECT_EQ(report.plan.source, PlanSource::kHeuristic);
}

TEST_F(TuneTest, BucketRoundsTokensUpAndKeepsTheRest) {
  Problem a = call.problem;
  a.rows = 200;
  EXPECT_EQ(problem_bucket(a), problem_bucket(call.problem));
  a.rows = 257;
  EXPECT_NE(problem_bucket(a), problem_bucket(call.problem));
  a = call.problem;
  a.sizes_dtype = DType::kInt64;
  EXPECT_EQ(problem_bucket(a), problem_bucket(call.problem)) << "index types change no speed";
  for (const auto change : std::initializer_list<void (*)(Problem&)>{
           [](Problem& p) { p.op = Op::kDx; }, [](Problem& p) { p.dtype = DType::kFloat16; },
           [](Problem& p) { p.out_dtype = DType::kFloat32; }, [](Problem& p) { p.experts = 5; },
           [](Problem& p) { p.n = 257; }, [](Problem& p) { p.k = 129; },
           [](Problem& p) { p.permutation = Permutation::kY; },
           [](Problem& p) { p.multiply = true; }, [](Problem& p) { p.accumulate = true; },
           [](Problem& p) { p.input_alignment = 8; }}) {
    Problem changed = call.problem;
    change(changed);
    EXPECT_NE(problem_bucket(changed), problem_bucket(call.problem));
  }
}

TEST_F(TuneTest, KernelSetChangesWithEveryKernel) {
  ThreeKernels changed;
  EXPECT_EQ(kernel_set_of(backend), kernel_set_of(changed));
  changed.list[2].stages = 2;
  EXPECT_NE(kernel_set_of(backend), kernel_set_of(changed));
}

TEST_F(TuneTest, KernelSetChangesWithTheKernelsSources) {
  EXPECT_EQ(std::string(cpu_kernel_sources()).size(), 16u);
  EXPECT_STRNE(cpu_kernel_sources(), cuda_kernel_sources());
  EXPECT_EQ(kernel_set_of(backend), kernel_set_of(backend, cpu_kernel_sources()));
  EXPECT_NE(kernel_set_of(backend), kernel_set_of(backend, "0123456789abcdef"));
}

}  // namespace
}  // namespace moegemm
