#include <vector>

#include "unit/core/validation/valid_call.h"

namespace moegemm {
namespace {

class ValidateCall : public testing::ValidCall {};

TEST_F(ValidateCall, ValidCallsAreDescribed) {
  for (const Call& call : {forward(), dx(), dw()}) {
    EXPECT_EQ(call.problem.experts, 3);
    EXPECT_EQ(call.problem.n, 4);
    EXPECT_EQ(call.problem.k, 5);
    EXPECT_EQ(call.problem.rows, 12);
    EXPECT_EQ(call.problem.topk, 2);
    EXPECT_EQ(call.problem.dtype, DType::kFloat32);
    EXPECT_EQ(call.problem.permutation, Permutation::kNone);
    EXPECT_EQ(call.operands.m_sizes, sizes.data());
    EXPECT_EQ(call.operands.gather_indices, nullptr) << "not read without a permutation";
    EXPECT_EQ(call.operands.router_weights, nullptr) << "not read without multiply";
  }
  EXPECT_EQ(forward().problem.op, Op::kForward);
  EXPECT_EQ(dx().problem.op, Op::kDx);
  EXPECT_EQ(dw().problem.op, Op::kDw);
}

TEST_F(ValidateCall, OperandsCarryPointersAndStrides) {
  x.row_stride = 8;
  const Call f = forward();
  EXPECT_EQ(f.operands.x, x_data.data());
  EXPECT_EQ(f.operands.x_stride, 8);
  EXPECT_EQ(f.operands.w, w_data.data());
  EXPECT_EQ(f.operands.w_stride, 5);
  EXPECT_EQ(f.operands.out, y_data.data());
  EXPECT_EQ(f.operands.out_stride, 4);
  EXPECT_EQ(f.operands.dy, nullptr);
  const Call d = dx();
  EXPECT_EQ(d.operands.dy, dy_data.data());
  EXPECT_EQ(d.operands.dy_stride, 4);
  EXPECT_EQ(d.operands.out, out_data.data());
  EXPECT_EQ(d.operands.x, nullptr);
}

TEST_F(ValidateCall, OnlyProductsWithWeightsBeginBeforeTheirRowsAreWritten) {
  ExecutionContext context;
  const auto rows_pending = [&](Problem problem) {
    take_context(problem, options, context);
    return problem.rows_pending;
  };
  for (const LaunchAhead ahead : {LaunchAhead::kAny, LaunchAhead::kWritesRows}) {
    context.ahead = ahead;
    EXPECT_EQ(rows_pending(forward().problem), ahead == LaunchAhead::kWritesRows);
    EXPECT_EQ(rows_pending(dx().problem), ahead == LaunchAhead::kWritesRows);
    EXPECT_FALSE(rows_pending(dw().problem));
  }
  const Problem problem = forward().problem;
  options.autotune = true;
  EXPECT_FALSE(rows_pending(problem)) << "timed launches follow others";
}

TEST_F(ValidateCall, PermuteXReadsOneRowPerToken) {
  options.permute_x = true;
  x = x_tokens;
  routing.gather_indices.dtype = DType::kInt64;
  EXPECT_EQ(forward().problem.rows, 12);
  EXPECT_EQ(forward().problem.index_dtype, DType::kInt64);
  EXPECT_EQ(dw().problem.rows, 12);
  EXPECT_EQ(dw().operands.gather_indices, indices.data());
}

TEST_F(ValidateCall, DyPerTokenReadsOneRowPerToken) {
  options.permute_y = options.dy_per_token = true;
  EXPECT_THROW(forward(), Error) << "it has no dy";
  dy.shape[0] = 6;
  EXPECT_EQ(dx().problem.rows, 12);
  EXPECT_EQ(dw().problem.rows, 12);
  EXPECT_EQ(dx().problem.gather_divisor(), 2);
  options.permute_y = false;
  EXPECT_THROW(dx(), Error) << "nothing is gathered";
}

TEST_F(ValidateCall, FlattenedWeightsAreTheSameProblem) {
  const Problem stacked = forward().problem;
  w = TensorView::matrix(w_data.data(), kType, 12, 5);
  EXPECT_EQ(forward().problem, stacked);
  EXPECT_EQ(dx().problem.n, 4);
  dw_out = TensorView::matrix(out_data.data(), kType, 12, 5);
  EXPECT_EQ(dw().problem.n, 4);
}

TEST_F(ValidateCall, ZeroRowsAreAccepted) {
  x = TensorView::matrix(nullptr, kType, 0, 5);
  y = TensorView::matrix(nullptr, kType, 0, 4);
  dy = TensorView::matrix(nullptr, kType, 0, 4);
  dx_out = TensorView::matrix(nullptr, kType, 0, 5);
  routing.gather_indices = TensorView::vector(nullptr, DType::kInt32, 0);
  routing.router_weights = TensorView::vector(nullptr, DType::kFloat32, 0);
  EXPECT_EQ(forward().problem.rows, 0);
  EXPECT_EQ(dx().problem.rows, 0);
  EXPECT_EQ(dw().problem.rows, 0);
  options.permute_y = options.multiply = true;
  EXPECT_EQ(forward().problem.rows, 0);
}

TEST_F(ValidateCall, AlignmentIsThatOfTheWorstInput) {
  x = TensorView::matrix(x_data.data(), kType, 12, 8);
  w = TensorView::stack(w_data.data(), kType, 3, 2, 8);
  y = TensorView::matrix(y_data.data(), kType, 12, 2);
  Problem problem = forward().problem;
  EXPECT_EQ(problem.input_alignment, 16);
  EXPECT_EQ(problem.output_alignment, 8) << "rows of 2 floats";
  w.data = w_data.data() + 1;
  EXPECT_EQ(forward().problem.input_alignment, 4);
}

// Flags

TEST_F(ValidateCall, BothPermutationsAreRefused) {
  options.permute_x = options.permute_y = true;
  expect_forward_refused(ErrorKind::kInvalidValue,
                         {"permute_x=true and permute_y=true", "at most one"});
}

TEST_F(ValidateCall, PermutationWithoutIndicesIsRefused) {
  routing.gather_indices = {};
  options.permute_x = true;
  expect_forward_refused(ErrorKind::kInvalidValue, {"gather_indices is not given", "permute_x"});
  options.permute_x = false;
  options.permute_y = true;
  expect_dx_refused(ErrorKind::kInvalidValue, {"gather_indices is not given", "permute_y"});
  expect_dw_refused(ErrorKind::kInvalidValue, {"gather_indices is not given", "permute_y"});
}

TEST_F(ValidateCall, MultiplyNeedsPermuteY) {
  options.multiply = true;
  expect_forward_refused(ErrorKind::kInvalidValue,
                         {"multiply=true with permute_y=false", "needs permute_y"});
}

TEST_F(ValidateCall, MultiplyNeedsWeights) {
  options.permute_y = options.multiply = true;
  routing.router_weights = {};
  expect_forward_refused(ErrorKind::kInvalidValue, {"router_weights is not given", "multiply"});
}

TEST_F(ValidateCall, AccumulateIsForDwOnly) {
  options.accumulate = true;
  expect_forward_refused(ErrorKind::kInvalidValue, {"accumulate", "forward", "only dW"});
  expect_dx_refused(ErrorKind::kInvalidValue, {"accumulate", "dX", "only dW"});
  EXPECT_TRUE(dw().problem.accumulate);
}

TEST_F(ValidateCall, AccumulateNeedsAFloat32Output) {
  x.dtype = dy.dtype = dw_out.dtype = DType::kBFloat16;
  options.accumulate = true;
  expect_dw_refused(ErrorKind::kInvalidType, {"dw has dtype bf16", "accumulate", "fp32"});
}

TEST_F(ValidateCall, TopkBelowOneIsRefused) {
  routing.topk = 0;
  expect_forward_refused(ErrorKind::kInvalidValue, {"topk is 0", "at least 1"});
}

// Bias and activation

TEST_F(ValidateCall, DescribesBiasAndActivation) {
  std::vector<float> bias_data(3 * 4);
  options.bias = TensorView::matrix(bias_data.data(), kType, 3, 4);
  options.activation = Activation{};
  y = TensorView::matrix(y_data.data(), kType, 12, 2);
  const Call call = forward();
  EXPECT_TRUE(call.problem.bias);
  EXPECT_EQ(call.problem.activation, Activation{});
  EXPECT_EQ(call.problem.output_columns(), 2);
  EXPECT_EQ(call.operands.bias, bias_data.data());
  EXPECT_EQ(call.operands.bias_stride, 4);
}

TEST_F(ValidateCall, RefusesWrongBiases) {
  std::vector<float> bias_data(3 * 8);
  options.bias = TensorView::matrix(bias_data.data(), kType, 3, 5);
  expect_forward_refused(ErrorKind::kInvalidValue, {"bias", "[3, 5]", "[E, columns]"});
  options.bias = TensorView::matrix(bias_data.data(), DType::kBFloat16, 3, 4);
  expect_forward_refused(ErrorKind::kInvalidType, {"bias", "bf16"});
  options.bias = TensorView::matrix(bias_data.data(), kType, 3, 4);
  expect_dw_refused(ErrorKind::kInvalidValue, {"bias", "dW"});
  options.bias = TensorView::matrix(y_data.data(), kType, 3, 4);
  expect_forward_refused(ErrorKind::kInvalidValue, {"y", "bias"});
}

TEST_F(ValidateCall, RefusesActivationsThatHaveNoPlace) {
  options.activation = Activation{};
  expect_forward_refused(ErrorKind::kInvalidValue, {"y", "[12, 4]", "activated columns"});
  expect_dx_refused(ErrorKind::kInvalidValue, {"the product", "5", "even"});
  expect_dw_refused(ErrorKind::kInvalidValue, {"activation", "dW"});
  options.permute_y = true;
  expect_forward_refused(ErrorKind::kInvalidValue, {"activation", "permute_y", "expert order"});
  options.multiply = true;
  expect_forward_refused(ErrorKind::kInvalidValue, {"activation", "multiply"});
  options = {};
  options.activation = Activation{.limit = -1.0f};
  y = TensorView::matrix(y_data.data(), kType, 12, 2);
  expect_forward_refused(ErrorKind::kInvalidValue, {"limit", "-1"});
}

}  // namespace
}  // namespace moegemm
