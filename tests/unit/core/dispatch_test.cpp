#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "moegemm/moegemm.h"
#include "unit/core/expect_refusal.h"
#include "unit/core/scoped_environment.h"

namespace moegemm {
namespace {

using testing::expect_refusal;
using testing::ScopedEnvironment;

/// E = 2, N = 1, K = 1, M = 4 with all weights 1: Y is X in another order.
class Dispatch : public ::testing::Test {
 protected:
  void run(bool permute_y = true) {
    RoutingView routing;
    routing.m_sizes = TensorView::vector(sizes.data(), DType::kInt64, 2);
    routing.gather_indices = TensorView::vector(indices.data(), DType::kInt64, 4);
    options.permute_y = permute_y;
    plan = forward(TensorView::matrix(x.data(), DType::kFloat32, 4, 1),
                   TensorView::stack(w.data(), DType::kFloat32, 2, 1, 1),
                   TensorView::matrix(y.data(), DType::kFloat32, 4, 1), routing, options);
  }

  std::vector<float> x = {10, 11, 12, 13};
  std::vector<float> w = {1, 1};
  std::vector<float> y = {-1, -1, -1, -1};
  std::vector<std::int64_t> sizes = {2, 2};
  std::vector<std::int64_t> indices = {3, 1, 0, 2};
  GemmOptions options;
  Plan plan;
};

TEST_F(Dispatch, RunsAndReturnsThePlan) {
  run();
  EXPECT_EQ(y, (std::vector<float>{12, 11, 13, 10}));
  ASSERT_EQ(plan.steps.size(), 1u);
  EXPECT_EQ(plan.product().backend, BackendKind::kCpu);
  EXPECT_FALSE(plan.product().kernel_name.empty());
  EXPECT_EQ(plan.workspace_bytes, 0);
}

TEST_F(Dispatch, RunsTheForcedBackend) {
  options.backend = BackendKind::kReference;
  run();
  EXPECT_EQ(plan.product().backend, BackendKind::kReference);
}

TEST(DispatchOnMeta, ChecksItsArgumentsAndRunsNothing) {
  const Device meta = {DeviceType::kMeta};
  RoutingView routing;
  routing.m_sizes = TensorView::vector(nullptr, DType::kInt64, 2, meta);
  const TensorView x = TensorView::matrix(nullptr, DType::kFloat32, 4, 3, 0, meta);
  const TensorView w = TensorView::stack(nullptr, DType::kFloat32, 2, 5, 3, 0, meta);
  const TensorView y = TensorView::matrix(nullptr, DType::kFloat32, 4, 5, 0, meta);
  EXPECT_EQ(forward(x, w, y, routing).steps.size(), 0u);
  combine(y, {}, 2, TensorView::matrix(nullptr, DType::kFloat32, 2, 5, 0, meta));
  expect_refusal(ErrorKind::kInvalidValue, {"y is fp32[4, 3] on meta", "[M, N] = [4, 5]"},
                 [&] { forward(x, w, x, routing); });
  expect_refusal(ErrorKind::kInvalidValue, {"rows is fp32[4, 5] on meta", "topk = 3"},
                 [&] { combine(y, {}, 3, y); });
}

TEST_F(Dispatch, BadRoutingDataIsNoErrorWithoutCheck) {
  indices = {3, 1, 99, -1};
  run();
  EXPECT_EQ(y[3], 10);
  EXPECT_EQ(y[1], 11);
}

TEST_F(Dispatch, CheckPassesGoodData) {
  options.check = true;
  EXPECT_NO_THROW(run());
}

TEST_F(Dispatch, CheckNamesTheFirstNegativeSizeAndWritesNothing) {
  options.check = true;
  sizes = {2, -3};
  expect_refusal(ErrorKind::kInvalidValue, {"m_sizes[1] is -3", "negative"}, [this] { run(); });
  EXPECT_EQ(y, (std::vector<float>{-1, -1, -1, -1}));
}

TEST_F(Dispatch, CheckNamesTheExpertWhereTheRowsRunOut) {
  options.check = true;
  sizes = {2, 3};
  expect_refusal(ErrorKind::kInvalidValue, {"m_sizes[1]", "add up to 5", "M = 4"},
                 [this] { run(); });
  sizes = {2, INT64_MAX};
  expect_refusal(ErrorKind::kInvalidValue, {"m_sizes[1]", "M = 4"}, [this] { run(); });
}

TEST_F(Dispatch, CheckNamesTheFirstIndexOutOfRange) {
  options.check = true;
  indices = {3, 1, 4, -1};
  expect_refusal(ErrorKind::kInvalidValue, {"gather_indices[2] is 4", "[0, M)", "M = 4"},
                 [this] { run(); });
}

TEST_F(Dispatch, CheckLeavesIndicesAloneThatTheCallDoesNotRead) {
  options.check = true;
  indices = {3, 1, 4, -1};
  EXPECT_NO_THROW(run(/*permute_y=*/false));
  EXPECT_EQ(y, x);
}

TEST_F(Dispatch, EnvironmentTurnsCheckOnEverywhere) {
  const ScopedEnvironment check("MOEGEMM_CHECK", "1");
  indices = {3, 1, 4, 0};
  expect_refusal(ErrorKind::kInvalidValue, {"gather_indices[2] is 4"}, [this] { run(); });
}

TEST_F(Dispatch, TensorsOnADeviceThatNothingServesAreRefused) {
  Problem problem;
  problem.experts = problem.n = problem.k = problem.rows = 1;
  problem.device = {DeviceType::kCuda, 0};
  expect_refusal(ErrorKind::kNotImplemented, {"cpu", "cuda:0"},
                 [&] { moegemm::plan(problem, BackendKind::kCpu); });
}

}  // namespace
}  // namespace moegemm
