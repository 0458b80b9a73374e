#include "unit/core/validation/valid_call.h"

namespace moegemm {
namespace {

/// A low-rank part of rank 2 beside the valid call of forward and of dX.
class LowRank : public testing::ValidCall {
 protected:
  LowRank() {
    options.low_rank_rows = TensorView::matrix(rows.data(), kType, 12, 2);
    options.low_rank_weights = forward_weights;
  }

  std::vector<float> rows = std::vector<float>(12 * 2);
  std::vector<float> weights_data = std::vector<float>(3 * 2 * 8);
  TensorView forward_weights = TensorView::stack(weights_data.data(), kType, 3, 4, 2);
  TensorView dx_weights = TensorView::stack(weights_data.data(), kType, 3, 2, 5);
};

TEST_F(LowRank, IsPartOfTheProblem) {
  const Call call = forward();
  EXPECT_EQ(call.problem.low_rank, 2);
  EXPECT_EQ(call.operands.low_rows, rows.data());
  EXPECT_EQ(call.operands.low_weights, weights_data.data());
  EXPECT_EQ(call.operands.low_rows_stride, 2);
  EXPECT_EQ(call.problem.input_alignment, 4) << "rows of 8 bytes, those of X of 20";
  EXPECT_DOUBLE_EQ(call.problem.flops(), 2.0 * 12 * 4 * (5 + 2));
  EXPECT_NE(to_string(call.problem).find("low_rank=2"), std::string::npos);
  options.low_rank_weights = dx_weights;
  EXPECT_DOUBLE_EQ(dx().problem.flops(), 2.0 * 12 * 5 * (4 + 2));
}

TEST_F(LowRank, AsAProductOfItsOwnContractsTheRank) {
  const Call call = forward();
  const Problem part = low_rank_part(call.problem);
  EXPECT_EQ(part.k, 2);
  EXPECT_EQ(part.n, 4);
  EXPECT_EQ(part.low_rank, 0);
  EXPECT_EQ(call.operands.low_rank_part().w, weights_data.data());
  EXPECT_EQ(call.operands.low_rank_part().x, rows.data());
  options.low_rank_weights = dx_weights;
  EXPECT_EQ(low_rank_part(dx().problem).n, 2);
  EXPECT_EQ(low_rank_part(dx().problem).k, 5);
}

TEST_F(LowRank, NeedsBothOperands) {
  options.low_rank_rows = {};
  expect_forward_refused(ErrorKind::kInvalidValue, {"low_rank_rows is", "low_rank_weights"});
  options.low_rank_rows = TensorView::matrix(rows.data(), kType, 12, 2);
  options.low_rank_weights = {};
  expect_forward_refused(ErrorKind::kInvalidValue, {"low_rank_weights is", "low_rank_rows"});
}

TEST_F(LowRank, HasTheRowsOfTheCall) {
  options.low_rank_rows.shape[0] = 11;
  expect_forward_refused(ErrorKind::kInvalidValue, {"low_rank_rows is fp32[11, 2]", "[M, r]"});
  options.low_rank_rows.shape = {12, 0};
  expect_forward_refused(ErrorKind::kInvalidValue, {"low_rank_rows", "r must be at least 1"});
}

TEST_F(LowRank, HasWeightsLikeW) {
  options.low_rank_weights = dx_weights;
  expect_forward_refused(ErrorKind::kInvalidValue,
                         {"low_rank_weights is fp32[3, 2, 5]", "[E, N, r] = [3, 4, 2]"});
  options.low_rank_weights = forward_weights;
  expect_dx_refused(ErrorKind::kInvalidValue,
                    {"low_rank_weights is fp32[3, 4, 2]", "[E, r, K] = [3, 2, 5]"});
  options.low_rank_weights.shape[0] = 2;
  expect_forward_refused(ErrorKind::kInvalidValue, {"low_rank_weights is fp32[2, 4, 2]"});
  options.low_rank_weights = forward_weights;
  options.low_rank_weights.dtype = DType::kFloat16;
  expect_forward_refused(ErrorKind::kInvalidType,
                         {"low_rank_weights has dtype fp16", "fp32", "the dtype of x"});
}

TEST_F(LowRank, FollowsTheLayoutOfTransposedWeights) {
  options.weight_layout = WeightLayout::kKn;
  w = TensorView::stack(w_data.data(), kType, 3, 5, 4);
  expect_forward_refused(ErrorKind::kInvalidValue, {"low_rank_weights", "[E, r, N] = [3, 2, 4]"});
  options.low_rank_weights = TensorView::stack(weights_data.data(), kType, 3, 2, 4);
  EXPECT_EQ(forward().problem.low_rank, 2);
  expect_dx_refused(ErrorKind::kInvalidValue, {"low_rank_weights", "[E, K, r] = [3, 5, 2]"});
}

TEST_F(LowRank, IsNotOfDw) {
  expect_dw_refused(ErrorKind::kInvalidValue, {"low-rank part", "dW", "only forward and dX"});
}

TEST_F(LowRank, MayNotBeTheOutput) {
  y.data = rows.data();
  expect_forward_refused(ErrorKind::kInvalidValue, {"overlaps low_rank_rows"});
}

}  // namespace
}  // namespace moegemm
