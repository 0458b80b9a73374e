#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "moegemm/passes.h"
#include "unit/core/expect_refusal.h"

namespace moegemm {
namespace {

using testing::expect_refusal;

/// T = 3, topk = 2, E = 4, M = 6, C = 5: each test breaks one thing.
class RouteRules : public ::testing::Test {
 protected:
  void run() const { route(expert_ids, experts, m_sizes, gather_indices, inverse); }
  void expect_refused(ErrorKind kind, std::initializer_list<const char*> parts) const {
    expect_refusal(kind, parts, [this] { run(); });
  }

  std::vector<std::int32_t> ids = {0, 1, 2, 3, 0, 1};
  std::vector<std::int32_t> sizes = std::vector<std::int32_t>(4);
  std::vector<std::int32_t> order = std::vector<std::int32_t>(6);
  std::vector<std::int32_t> back = std::vector<std::int32_t>(6);
  std::int64_t experts = 4;
  TensorView expert_ids = TensorView::matrix(ids.data(), DType::kInt32, 3, 2);
  TensorView m_sizes = TensorView::vector(sizes.data(), DType::kInt32, 4);
  TensorView gather_indices = TensorView::vector(order.data(), DType::kInt32, 6);
  TensorView inverse = TensorView::vector(back.data(), DType::kInt32, 6);
};

TEST_F(RouteRules, ValidArgumentsAreAccepted) {
  EXPECT_NO_THROW(run());
  inverse = {};
  EXPECT_NO_THROW(run());
}

TEST_F(RouteRules, ExpertsMustBePositive) {
  experts = 0;
  expect_refused(ErrorKind::kInvalidValue, {"experts is 0", "at least 1"});
}

TEST_F(RouteRules, IdsAreAMatrixOfIntegers) {
  expert_ids.dtype = DType::kFloat32;
  expect_refused(ErrorKind::kInvalidType, {"expert_ids has dtype fp32", "int32 and int64"});
  expert_ids = TensorView::vector(ids.data(), DType::kInt32, 6);
  expect_refused(ErrorKind::kInvalidValue,
                 {"expert_ids is int32[6]", "its shape must be [T, topk]"});
  expert_ids = TensorView::matrix(ids.data(), DType::kInt32, 3, 0);
  expect_refused(ErrorKind::kInvalidValue, {"expert_ids is int32[3, 0]", "at least 1"});
}

TEST_F(RouteRules, OutputsShareOneDtypeAndHaveTheirLengths) {
  gather_indices.shape[0] = 5;
  expect_refused(ErrorKind::kInvalidValue, {"gather_indices is int32[5]", "[M] = [6]"});
  gather_indices.shape[0] = 6;
  inverse.dtype = DType::kInt64;
  expect_refused(ErrorKind::kInvalidType,
                 {"inverse has dtype int64", "it must have int32, the dtype of m_sizes"});
  m_sizes.shape[0] = 3;
  expect_refused(ErrorKind::kInvalidValue, {"m_sizes is int32[3]", "[E] = [4]"});
}

TEST_F(RouteRules, MoreRowsThan32BitsCountNeed64BitIndices) {
  expert_ids.shape[0] = std::int64_t{1} << 30;
  expect_refused(ErrorKind::kInvalidValue,
                 {"gather_indices is int32", "2147483648 rows need int64 indices"});
}

TEST_F(RouteRules, OutputsHaveMemory) {
  for (TensorView* output : {&m_sizes, &gather_indices, &inverse}) {
    void* const data = output->data;
    output->data = nullptr;
    expect_refused(ErrorKind::kInvalidValue, {"with a null data pointer"});
    output->data = data;
  }
}

TEST_F(RouteRules, OutputsMustNotOverlap) {
  inverse = gather_indices;
  expect_refused(ErrorKind::kInvalidValue, {"inverse overlaps gather_indices"});
  gather_indices.data = ids.data();
  expect_refused(ErrorKind::kInvalidValue, {"gather_indices overlaps expert_ids"});
}

TEST_F(RouteRules, DevicesMustAgree) {
  m_sizes.device = {DeviceType::kCuda, 0};
  expect_refused(ErrorKind::kInvalidType, {"m_sizes is on cuda:0", "on cpu, where expert_ids is"});
}

TEST(RouteWorkspace, CpuNeedsNone) {
  EXPECT_EQ(route_workspace_bytes(1000, 8, Device{}), 0);
  expect_refusal(ErrorKind::kInvalidValue, {"rows is -1"},
                 [] { route_workspace_bytes(-1, 8, Device{}); });
  expect_refusal(ErrorKind::kInvalidValue, {"experts is 0"},
                 [] { route_workspace_bytes(1, 0, Device{}); });
}

class CombineRules : public ::testing::Test {
 protected:
  void expect_refused(ErrorKind kind, std::initializer_list<const char*> parts) const {
    expect_refusal(kind, parts, [this] { combine(rows, weights, topk, out); });
  }

  std::vector<float> rows_data = std::vector<float>(6 * 5);
  std::vector<float> weights_data = std::vector<float>(6);
  std::vector<float> out_data = std::vector<float>(3 * 5);
  std::int64_t topk = 2;
  TensorView rows = TensorView::matrix(rows_data.data(), DType::kFloat32, 6, 5);
  TensorView weights = TensorView::vector(weights_data.data(), DType::kFloat32, 6);
  TensorView out = TensorView::matrix(out_data.data(), DType::kFloat32, 3, 5);
};

TEST_F(CombineRules, ArgumentsAreChecked) {
  EXPECT_NO_THROW(combine(rows, weights, topk, out));
  out.shape[0] = 2;
  expect_refused(ErrorKind::kInvalidValue, {"out is fp32[2, 5]", "[T, C] = [3, 5]"});
  topk = 4;
  expect_refused(ErrorKind::kInvalidValue, {"rows is fp32[6, 5]", "multiple of topk = 4"});
  topk = 0;
  expect_refused(ErrorKind::kInvalidValue, {"topk is 0"});
}

TEST_F(CombineRules, WeightsFollowTheRows) {
  weights.shape[0] = 5;
  expect_refused(ErrorKind::kInvalidValue, {"weights is fp32[5]", "[M] or [T, topk] with M = 6"});
  weights.shape[0] = 6;
  weights.dtype = DType::kBFloat16;
  expect_refused(ErrorKind::kInvalidType, {"weights has dtype bf16", "fp32, the dtype of rows"});
}

TEST_F(CombineRules, OutputMustNotOverlapTheRows) {
  out.data = rows_data.data();
  expect_refused(ErrorKind::kInvalidValue, {"out overlaps rows"});
}

class ScaleRowsRules : public ::testing::Test {
 protected:
  ScaleRowsRules() {
    routing.m_sizes = TensorView::vector(sizes.data(), DType::kInt32, 2);
    routing.gather_indices = TensorView::vector(order.data(), DType::kInt32, 6);
    routing.router_weights = TensorView::vector(weights.data(), DType::kFloat32, 6);
    routing.topk = 2;
  }
  void run() const { scale_rows(product, x, routing, scaled, dot, scaled_x); }
  void expect_refused(ErrorKind kind, std::initializer_list<const char*> parts) const {
    expect_refusal(kind, parts, [this] { run(); });
  }

  std::vector<float> product_data = std::vector<float>(6 * 5);
  std::vector<float> x_data = std::vector<float>(6 * 5);
  std::vector<float> scaled_data = std::vector<float>(6 * 5);
  std::vector<float> scaled_x_data = std::vector<float>(6 * 5);
  std::vector<float> dot_data = std::vector<float>(6);
  std::vector<float> weights = std::vector<float>(6);
  std::vector<std::int32_t> sizes = {3, 3};
  std::vector<std::int32_t> order = {0, 1, 2, 3, 4, 5};
  TensorView product = TensorView::matrix(product_data.data(), DType::kFloat32, 6, 5);
  TensorView x = TensorView::matrix(x_data.data(), DType::kFloat32, 6, 5);
  TensorView scaled = TensorView::matrix(scaled_data.data(), DType::kFloat32, 6, 5);
  TensorView scaled_x = TensorView::matrix(scaled_x_data.data(), DType::kFloat32, 6, 5);
  TensorView dot = TensorView::vector(dot_data.data(), DType::kFloat32, 6);
  RoutingView routing;
};

TEST_F(ScaleRowsRules, ValidArgumentsAreAcceptedInPlaceToo) {
  EXPECT_NO_THROW(run());
  scaled = product;
  scaled_x = {};
  EXPECT_NO_THROW(run());
}

TEST_F(ScaleRowsRules, ShapesMustAgree) {
  scaled.shape[1] = 4;
  expect_refused(ErrorKind::kInvalidValue, {"scaled is fp32[6, 4]", "[M, K] = [6, 5]"});
  product.shape[0] = 5;
  expect_refused(ErrorKind::kInvalidValue, {"product is fp32[5, 5]", "[M, K] = [6, 5]"});
  product.shape[0] = 6;
  scaled.shape[1] = 5;
  dot.shape[0] = 5;
  expect_refused(ErrorKind::kInvalidValue, {"dot is fp32[5]", "[M] = [6]"});
}

TEST_F(ScaleRowsRules, RoutingIsRequired) {
  routing.router_weights = {};
  expect_refused(ErrorKind::kInvalidValue, {"router_weights is not given"});
  routing.gather_indices = {};
  expect_refused(ErrorKind::kInvalidValue, {"gather_indices is not given"});
  routing.m_sizes = {};
  expect_refused(ErrorKind::kInvalidValue, {"m_sizes is not given"});
}

TEST_F(ScaleRowsRules, DtypesFollowX) {
  x.dtype = DType::kBFloat16;
  expect_refused(ErrorKind::kInvalidType,
                 {"scaled_x has dtype fp32", "it must have bf16, the dtype of x"});
  scaled.dtype = DType::kFloat16;
  expect_refused(ErrorKind::kInvalidType,
                 {"scaled has dtype fp16", "fp32 and bf16, the dtype of x"});
}

TEST_F(ScaleRowsRules, OutputsMustNotOverlapAnythingElse) {
  scaled_x = x;
  expect_refused(ErrorKind::kInvalidValue, {"scaled_x overlaps x"});
  scaled = x;
  expect_refused(ErrorKind::kInvalidValue, {"scaled overlaps x"});
  scaled_x = {};
  scaled = product;
  scaled.data = product_data.data() + 1;
  scaled.shape[0] = product.shape[0] = x.shape[0] = 5;
  routing.gather_indices.shape[0] = routing.router_weights.shape[0] = dot.shape[0] = 5;
  expect_refused(ErrorKind::kInvalidValue, {"scaled overlaps product"});
}

TEST_F(ScaleRowsRules, SegmentsFollowOneAnother) {
  std::vector<std::int32_t> begins = {0, 3};
  routing.starts = TensorView::vector(begins.data(), DType::kInt32, 2);
  expect_refused(ErrorKind::kInvalidValue, {"scale_rows with starts", "must follow one another"});
  routing.ends = true;
  expect_refused(ErrorKind::kInvalidValue, {"starts is given with ends"});
  routing.starts = {};
  expect_refused(ErrorKind::kInvalidValue, {"scale_rows with ends", "must follow one another"});
  routing.ends = false;
  routing.expected_rows = -2;
  expect_refused(ErrorKind::kInvalidValue, {"expected_rows is -2", "must not be negative"});
}

TEST_F(ScaleRowsRules, RowsAfterAllSegmentsAreZeroOrStayAsTheyAre) {
  sizes = {2, 1};
  scaled_data.assign(6 * 5, 7.0f);
  routing.tails = Tails::kUndefined;
  run();
  EXPECT_EQ(scaled_data[2 * 5], 0.0f) << "a row of the second expert";
  EXPECT_EQ(scaled_data[3 * 5], 7.0f);
  routing.tails = Tails::kZero;
  run();
  EXPECT_EQ(scaled_data[3 * 5], 0.0f);
}

}  // namespace
}  // namespace moegemm
