#include "core/tuning/tune_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <fstream>
#include <map>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/planning/kernel_step.h"
#include "core/refusal.h"
#include "core/registry.h"
#include "core/tuning/cache/kernel_sources.h"
#include "core/tuning/cache/store.h"
#include "unit/core/expect_refusal.h"
#include "unit/core/scoped_environment.h"
#include "unit/core/tuning/cache/temporary_folder.h"
#include "unit/core/tuning/measure/fake_stopwatch.h"
#include "unit/core/tuning/measure/host_support.h"

namespace moegemm {
namespace {

using testing::expect_refusal;
using testing::FakeStopwatch;
using ::testing::HasSubstr;
using testing::HostSupport;
using testing::ScopedEnvironment;
using testing::TemporaryFolder;

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

/// The real thing on the CPU backend: dX has three kernels.
class TuneOnCpuTest : public ::testing::Test {
 protected:
  TuneOnCpuTest() {
    options.autotune = true;
    context.tuning = &support;
    for (std::size_t i = 0; i < dy.size(); ++i) dy[i] = static_cast<float>(i % 7) - 3;
    for (std::size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(i % 5) - 2;
  }
  ~TuneOnCpuTest() override { process_planner().forget_plans(); }

  TensorView dy_view() const { return TensorView::matrix(dy.data(), DType::kFloat32, kRows, kN); }
  TensorView w_view() const { return TensorView::stack(w.data(), DType::kFloat32, 2, kN, kK); }
  TensorView dx_view() const { return TensorView::matrix(dx.data(), DType::kFloat32, kRows, kK); }
  RoutingView routing() const {
    return {TensorView::vector(m_sizes.data(), DType::kInt32, 2), {}, {}, 1};
  }
  Plan call() const {
    return backward_dx(dy_view(), w_view(), dx_view(), routing(), options, context);
  }
  TuneReport tune(bool again = false) const {
    return tune_dx(dy_view(), w_view(), dx_view(), routing(), options, context, again);
  }

  static constexpr int kRows = 24;
  static constexpr int kN = 64;
  static constexpr int kK = 48;
  TemporaryFolder folder;
  ScopedEnvironment cache{"MOEGEMM_CACHE_DIR", folder.path().c_str()};
  ScopedEnvironment allowed{"MOEGEMM_AUTOTUNE", ""};
  HostSupport support;
  GemmOptions options;
  ExecutionContext context;
  std::vector<float> dy = std::vector<float>(kRows * kN);
  std::vector<float> w = std::vector<float>(2 * kN * kK);
  std::vector<float> dx = std::vector<float>(kRows * kK, -7);
  std::vector<std::int32_t> m_sizes = {10, 14};
};

TEST_F(TuneOnCpuTest, MeasuresOnceRemembersAndTouchesNoTensor) {
  const std::vector<float> dy_before = dy;
  const std::vector<float> w_before = w;
  const TuneReport report = tune();
  EXPECT_TRUE(report.measured);
  EXPECT_LE(report.seconds, 2.2);
  EXPECT_GT(report.operand_sets, 1) << "the operands are smaller than any cache";
  EXPECT_FALSE(report.flushed);
  EXPECT_GE(report.candidates.size(), 3u);
  EXPECT_EQ(dy, dy_before);
  EXPECT_EQ(w, w_before);
  for (const float value : dx) EXPECT_EQ(value, -7) << "the output is only described";
  const int calls = support.calls;
  EXPECT_GT(calls, 0);
  EXPECT_FALSE(tune().measured) << "it is known";
  EXPECT_EQ(support.calls, calls);
  EXPECT_TRUE(tune(true).measured) << "asked for again";
}

TEST_F(TuneOnCpuTest, CallMeasuresAnUnknownProblemAndThenUsesTheResult) {
  const Plan first = call();
  EXPECT_EQ(first.source, PlanSource::kTuned);
  const int calls = support.calls;
  EXPECT_GT(calls, 0);
  EXPECT_EQ(call(), first);
  EXPECT_EQ(support.calls, calls);
  ASSERT_EQ(tuning_cache_entries().size(), 1u);
  EXPECT_EQ(tuning_cache_entries()[0].kernel, first.product().kernel_name);
  const std::vector<float> tuned = dx;
  options.autotune = false;
  EXPECT_EQ(call().source, PlanSource::kHeuristic) << "a plain call never asks the cache";
  EXPECT_EQ(dx, tuned) << "dX has the same bits whichever kernel runs it";
}

TEST_F(TuneOnCpuTest, AnotherProcessFindsItInTheFile) {
  const Plan plan = call();
  const TunedRecords stored = read_tuning_file(tuning_cache_path());
  ASSERT_EQ(stored.size(), 1u);
  EXPECT_EQ(stored.begin()->second.kernel, plan.product().kernel_name);
  EXPECT_EQ(stored.begin()->first.version, version());
}

TEST_F(TuneOnCpuTest, AnActivationIsMeasuredWithTheProduct) {
  options.activation.emplace();
  std::vector<float> activated(kRows * kK / 2);
  const auto view = TensorView::matrix(activated.data(), DType::kFloat32, kRows, kK / 2);
  const TuneReport report = tune_dx(dy_view(), w_view(), view, routing(), options, context);
  EXPECT_TRUE(report.measured);
  const int calls = support.calls;
  const Plan plan = backward_dx(dy_view(), w_view(), view, routing(), options, context);
  EXPECT_EQ(support.calls, calls) << "the call uses what was measured ahead of it";
  EXPECT_EQ(plan, report.plan) << "the plan that was measured is the plan that runs";
  EXPECT_TRUE(plan.has(StepKind::kActivate));
  EXPECT_EQ(plan.source, PlanSource::kTuned);
  EXPECT_TRUE(report.problem.activation.has_value());
  EXPECT_GE(report.memory_bytes, plan.workspace_bytes);
}

TEST_F(TuneOnCpuTest, WithoutSupportNothingIsMeasured) {
  context.tuning = nullptr;
  EXPECT_EQ(call().source, PlanSource::kHeuristic);
  EXPECT_TRUE(tuning_cache_entries().empty());
  expect_refusal(ErrorKind::kInvalidValue, {"context.tuning is null"}, [&] { tune(); });
}

TEST_F(TuneOnCpuTest, EnvironmentForbidsMeasuring) {
  const ScopedEnvironment forbidden("MOEGEMM_AUTOTUNE", "0");
  EXPECT_EQ(call().source, PlanSource::kHeuristic);
  EXPECT_EQ(support.calls, 0);
  EXPECT_EQ(tune().why_not, "MOEGEMM_AUTOTUNE is 0");
}

TEST_F(TuneOnCpuTest, UnknownWordInTheEnvironmentIsAnError) {
  const ScopedEnvironment wrong("MOEGEMM_AUTOTUNE", "never");
  expect_refusal(ErrorKind::kInvalidValue, {"MOEGEMM_AUTOTUNE", "'never'", "0 and 1"},
                 [&] { call(); });
}

TEST_F(TuneOnCpuTest, NoMemoryMeansTheHeuristic) {
  support.most_bytes = 0;
  EXPECT_EQ(call().source, PlanSource::kHeuristic);
  EXPECT_THAT(tune().why_not, HasSubstr("no memory"));
}

TEST_F(TuneOnCpuTest, MemoryForOneOutputAndTheCacheIsEnough) {
  support.most_bytes = 32 << 20;  // copies take twice the cache
  const TuneReport report = tune();
  EXPECT_TRUE(report.measured);
  if (cache_sizes({}).flush_bytes < support.most_bytes) return;  // two small caches fit
  EXPECT_TRUE(report.flushed);
}

TEST_F(TuneOnCpuTest, InterruptedMeasurementStillRunsTheCall) {
  support.stop_after = 0;
  EXPECT_EQ(call().source, PlanSource::kHeuristic);
  EXPECT_NE(dx[0], -7);
  EXPECT_TRUE(tuning_cache_entries().empty());
}

TEST_F(TuneOnCpuTest, ProblemWithOneKernelIsSettledWithoutMeasuring) {
  const auto x = TensorView::matrix(dy.data(), DType::kFloat32, kRows, kN);
  std::vector<float> weights(2 * kK * kN);
  const auto w_forward = TensorView::stack(weights.data(), DType::kFloat32, 2, kK, kN);
  const auto report = tune_forward(x, w_forward, dx_view(), routing(), options, context);
  EXPECT_FALSE(report.measured);
  EXPECT_THAT(report.why_not, HasSubstr("no other kernel"));
  EXPECT_EQ(support.calls, 0);
  EXPECT_EQ(forward(x, w_forward, dx_view(), routing(), options, context).source,
            PlanSource::kTuned)
      << "nothing is left to be measured";
  EXPECT_TRUE(tuning_cache_entries().empty());
}

TEST_F(TuneOnCpuTest, WarmUpThatUsesUpTheBudgetSettlesOnTheHeuristicsKernelAndSaysSo) {
  support.budget_seconds = 1e-9;
  const TuneReport report = tune();
  EXPECT_FALSE(report.measured);
  EXPECT_THAT(report.why_not, HasSubstr("the whole budget of 1e-09 s"));
  const int calls = support.calls;
  EXPECT_EQ(call().product().kernel_name, report.plan.product().kernel_name);
  EXPECT_EQ(tune().why_not, report.why_not) << "not: known already";
  EXPECT_EQ(support.calls, calls) << "later calls do not measure again";
  EXPECT_TRUE(tuning_cache_entries().empty());
  support.budget_seconds = 20;
  EXPECT_TRUE(tune().measured) << "more time is another chance";
  EXPECT_EQ(tune().why_not, "");
}

TEST_F(TuneOnCpuTest, ProgressMayItselfMakeCallsThatTune) {
  Plan inside;
  TuneReport refused;
  support.on_progress = [&] {
    inside = call();
    refused = tune(true);
  };
  EXPECT_TRUE(tune().measured);
  EXPECT_EQ(inside.source, PlanSource::kHeuristic);
  EXPECT_FALSE(refused.measured);
  EXPECT_EQ(refused.why_not, "this thread is measuring already");
}

TEST_F(TuneOnCpuTest, ProgressMayWaitForAThreadThatTunes) {
  HostSupport other_support;
  ExecutionContext other_context = context;
  other_context.tuning = &other_support;
  TuneReport other;
  support.on_progress = [&] {
    if (support.calls > 1) return;
    std::thread([&] {
      other = tune_dx(dy_view(), w_view(), dx_view(), routing(), options, other_context, true);
    }).join();
  };
  EXPECT_TRUE(tune().measured);
  EXPECT_TRUE(other.measured);
}

TEST_F(TuneOnCpuTest, WhatProgressThrowsReachesTheCaller) {
  support.on_progress = [] { throw std::out_of_range("stop here"); };
  EXPECT_THROW(tune(), std::out_of_range);
  EXPECT_THROW(call(), std::out_of_range);
  support.on_progress = nullptr;
  EXPECT_TRUE(tune().measured) << "the next one has its turn";
}

TEST_F(TuneOnCpuTest, ReportSaysWhyAMeasurementIsNotSaved) {
  std::ofstream(folder.path() / "file") << "in the way";
  const ScopedEnvironment blocked("MOEGEMM_CACHE_DIR", (folder.path() / "file").c_str());
  const TuneReport report = tune();
  EXPECT_TRUE(report.measured);
  EXPECT_THAT(report.not_saved, HasSubstr("cannot create"));
  const std::string text = export_tuning_cache();
  expect_refusal(ErrorKind::kRuntime, {"not saved", "cannot create"},
                 [&] { import_tuning_cache(text); });
  EXPECT_EQ(tuning_cache_entries().size(), 1u) << "this process has it";
}

TEST_F(TuneOnCpuTest, ExportedCacheCanBeImportedElsewhere) {
  call();
  const std::string text = export_tuning_cache();
  const std::vector<TunedEntry> entries = tuning_cache_entries();
  const TemporaryFolder elsewhere;
  const ScopedEnvironment moved("MOEGEMM_CACHE_DIR", elsewhere.path().c_str());
  EXPECT_TRUE(tuning_cache_entries().empty());
  EXPECT_EQ(import_tuning_cache(text), 1u);
  ASSERT_EQ(tuning_cache_entries().size(), 1u);
  EXPECT_EQ(tuning_cache_entries()[0].kernel, entries[0].kernel);
  EXPECT_EQ(clear_tuning_cache(), 1u);
  expect_refusal(ErrorKind::kInvalidValue, {"no tuning cache", "not JSON"},
                 [] { import_tuning_cache("hello"); });
}

TEST_F(TuneOnCpuTest, AnotherCacheFolderHasMeasurementsOfItsOwn) {
  const Plan first = call();
  const int calls = support.calls;
  {
    const TemporaryFolder elsewhere;
    const ScopedEnvironment moved("MOEGEMM_CACHE_DIR", elsewhere.path().c_str());
    context.tuning = nullptr;
    EXPECT_EQ(call().source, PlanSource::kHeuristic) << "nothing was measured for this folder";
    context.tuning = &support;
    EXPECT_EQ(call().source, PlanSource::kTuned);
    EXPECT_GT(support.calls, calls);
    EXPECT_EQ(tuning_cache_entries().size(), 1u);
  }
  const int all_calls = support.calls;
  EXPECT_EQ(call(), first) << "back in the first folder what was found there holds";
  EXPECT_EQ(support.calls, all_calls);
}

TEST_F(TuneOnCpuTest, KnownProblemCostsACallNextToNothing) {
  call();
  Problem problem;
  problem.op = Op::kDx;
  problem.dtype = problem.out_dtype = DType::kFloat32;
  problem.experts = 2;
  problem.rows = kRows;
  problem.n = kN;
  problem.k = kK;
  const auto best_ns = [&](bool autotune) {
    double best = 1e9;
    for (int round = 0; round < 50; ++round) {
      constexpr int kCalls = 200;
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < kCalls; ++i) plan_problem(problem, {}, {}, autotune);
      const std::chrono::duration<double, std::nano> took =
          std::chrono::steady_clock::now() - begin;
      best = std::min(best, took.count() / kCalls);
    }
    return best;
  };
  const double plain = best_ns(false);
  const double tuned = best_ns(true);
  RecordProperty("plain_ns", static_cast<int>(plain));
  RecordProperty("tuned_ns", static_cast<int>(tuned));
  EXPECT_LT(tuned, plain + 100 + plain);  // sanitizers multiply both
}

}  // namespace
}  // namespace moegemm
