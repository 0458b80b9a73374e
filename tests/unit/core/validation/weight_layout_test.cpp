#include "core/planning/stored_form.h"
#include "unit/core/validation/valid_call.h"

namespace moegemm {
namespace {

/// W and dW as [E, K, N]: the same products, and in the kernels' terms others.
class WeightLayoutOfACall : public testing::ValidCall {
 protected:
  WeightLayoutOfACall() {
    options.weight_layout = WeightLayout::kKn;
    w = TensorView::stack(w_data.data(), kType, 3, 5, 4);
    dw_out = TensorView::stack(out_data.data(), kType, 3, 5, 4);
  }
};

TEST_F(WeightLayoutOfACall, IsAFieldOfTheProblem) {
  for (const Call& call : {forward(), dx(), dw()}) {
    EXPECT_EQ(call.problem.weight_layout, WeightLayout::kKn);
    EXPECT_EQ(call.problem.n, 4);
    EXPECT_EQ(call.problem.k, 5);
    EXPECT_NE(to_string(call.problem).find(" W=[E, K, N]"), std::string::npos);
  }
  w = TensorView::matrix(w_data.data(), kType, 15, 4);
  EXPECT_EQ(forward().problem.k, 5) << "flattened";
}

TEST_F(WeightLayoutOfACall, RefusesShapesOfTheOtherLayout) {
  w = TensorView::stack(w_data.data(), kType, 3, 4, 5);
  expect_forward_refused(ErrorKind::kInvalidValue, {"x is fp32[12, 5]", "must be K = 4 as in w"});
  dw_out = TensorView::stack(out_data.data(), kType, 3, 4, 5);
  expect_dw_refused(ErrorKind::kInvalidValue, {"dw is fp32[3, 4, 5]", "[E, K, N] = [3, 5, 4]"});
}

TEST_F(WeightLayoutOfACall, DoesNotMultiply) {
  options.permute_y = options.multiply = true;
  expect_forward_refused(ErrorKind::kInvalidValue, {"multiply=true", "[E, K, N]"});
}

TEST_F(WeightLayoutOfACall, ForwardIsTheKernelsDx) {
  options.permute_x = true;
  x = x_tokens;
  const Call call = in_stored_form(forward());
  EXPECT_EQ(call.problem.op, Op::kDx);
  EXPECT_EQ(call.problem.weight_layout, WeightLayout::kNk);
  EXPECT_EQ(call.problem.permutation, Permutation::kY);
  EXPECT_TRUE(call.problem.dy_per_token);
  EXPECT_EQ(call.problem.n, 5);
  EXPECT_EQ(call.problem.k, 4);
  EXPECT_EQ(call.problem.topk, 2);
  EXPECT_EQ(call.operands.dy, x_data.data());
  EXPECT_EQ(call.operands.x, nullptr);
  EXPECT_EQ(call.operands.dy_stride, 5);
}

TEST_F(WeightLayoutOfACall, EverySlotOfAGatheredDyIsATokenOfTheKernelsForward) {
  options.permute_y = true;
  const Problem stored = in_stored_form(dx()).problem;
  EXPECT_EQ(stored.op, Op::kForward);
  EXPECT_EQ(stored.permutation, Permutation::kX);
  EXPECT_EQ(stored.topk, 1);
  options.dy_per_token = true;
  dy.shape[0] = 6;
  EXPECT_EQ(in_stored_form(dx()).problem.topk, 2);
  EXPECT_EQ(in_stored_form(dw()).problem.topk, 2);
  EXPECT_FALSE(in_stored_form(dw()).problem.dy_per_token);
}

TEST_F(WeightLayoutOfACall, SwapsTheOperandsOfDw) {
  const Call call = in_stored_form(dw());
  EXPECT_EQ(call.problem.op, Op::kDw);
  EXPECT_EQ(call.operands.dy, x_data.data());
  EXPECT_EQ(call.operands.x, dy_data.data());
  EXPECT_EQ(call.problem.n, 5);
}

TEST_F(WeightLayoutOfACall, LeavesTheOtherLayoutAsItIs) {
  options.weight_layout = WeightLayout::kNk;
  w = TensorView::stack(w_data.data(), kType, 3, 4, 5);
  const Call call = forward();
  EXPECT_EQ(in_stored_form(call).problem, call.problem);
  EXPECT_EQ(in_stored_form(call).operands.x, call.operands.x);
}

}  // namespace
}  // namespace moegemm
