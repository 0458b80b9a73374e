#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/registry.h"
#include "core/tuning/cache/store.h"
#include "core/tuning/tune_call.h"
#include "unit/core/expect_refusal.h"
#include "unit/core/scoped_environment.h"
#include "unit/core/tuning/cache/temporary_folder.h"
#include "unit/core/tuning/measure/host_support.h"

namespace moegemm {
namespace {

using testing::expect_refusal;
using ::testing::HasSubstr;
using testing::HostSupport;
using testing::ScopedEnvironment;
using testing::TemporaryFolder;

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

TEST_F(TuneOnCpuTest, BudgetThatIsNotAboveZeroIsRefused) {
  for (const double budget : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    support.budget_seconds = budget;
    expect_refusal(ErrorKind::kInvalidValue, {"budget_seconds is", "above 0"}, [&] { tune(); });
  }
}

TEST_F(TuneOnCpuTest, AConfigLeavesNothingToMeasure) {
  options.config = KernelConfig{};
  expect_refusal(ErrorKind::kInvalidValue, {"options.config is given", "nothing left to measure"},
                 [&] { tune(); });
}

TEST_F(TuneOnCpuTest, CheckComesBeforeTheMeasurement) {
  m_sizes = {10, 15};
  {
    const ScopedEnvironment check("MOEGEMM_CHECK", "1");
    expect_refusal(ErrorKind::kInvalidValue, {"add up to 25"}, [&] { tune(); });
  }
  options.check = true;
  expect_refusal(ErrorKind::kInvalidValue, {"add up to 25"}, [&] { call(); });
  expect_refusal(ErrorKind::kInvalidValue, {"add up to 25"}, [&] { tune(); });
  EXPECT_EQ(support.calls, 0);
  EXPECT_TRUE(tuning_cache_entries().empty());
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
