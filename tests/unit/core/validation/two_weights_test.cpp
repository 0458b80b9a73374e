#include "unit/core/validation/valid_call.h"

namespace moegemm {
namespace {

/// The valid forward with the columns of Y in two tensors, N = 4 in each.
class TwoWeights : public testing::ValidCall {
 protected:
  TwoWeights() { options.w_up = TensorView::stack(both.data() + 60, kType, 3, 4, 5); }

  std::vector<float> both = std::vector<float>(120);
  TensorView gates = TensorView::stack(both.data(), kType, 3, 4, 5);
  TensorView wide = TensorView::matrix(y_data.data(), kType, 12, 8);

  void expect_refused(std::initializer_list<const char*> parts) {
    testing::expect_refusal(ErrorKind::kInvalidValue, parts,
                            [this] { described_call(Op::kForward, x, gates, wide); });
  }
};

TEST_F(TwoWeights, AreTheHalvesOfN) {
  const Call call = described_call(Op::kForward, x, gates, wide);
  EXPECT_TRUE(call.problem.ups_apart);
  EXPECT_EQ(call.problem.n, 8);
  EXPECT_EQ(call.operands.w_up, both.data() + 60);
  EXPECT_NE(to_string(call.problem).find("ups_apart"), std::string::npos);
}

TEST_F(TwoWeights, ToldWhetherTheSecondLiesBehindTheFirst) {
  EXPECT_TRUE(described_call(Op::kForward, x, gates, wide).problem.ups_follow);
  options.w_up = TensorView::stack(both.data() + 58, kType, 3, 4, 5);
  EXPECT_FALSE(described_call(Op::kForward, x, gates, wide).problem.ups_follow) << "232 bytes";
  std::swap(gates, options.w_up);
  EXPECT_FALSE(described_call(Op::kForward, x, gates, wide).problem.ups_follow) << "before it";
}

TEST_F(TwoWeights, LookAlike) {
  options.w_up.shape[1] = 3;
  expect_refused({"w_up is fp32[3, 3, 5]", "as w, fp32[3, 4, 5]"});
}

TEST_F(TwoWeights, HaveOnePitch) {
  const Description described_dense = described(Op::kForward, x, gates, wide, routing, options);
  options.w_up.row_stride = 6;
  expect_refused({"w_up has row_stride 6", "that of w, 5"});
  testing::expect_refusal(ErrorKind::kInvalidValue, {"w_up has row_stride 6", "that of w, 5"}, [&] {
    run(described_dense, x, gates, wide, routing, options, ExecutionContext{});
  });
  gates.row_stride = 6;
  EXPECT_EQ(described_call(Op::kForward, x, gates, wide).operands.w_stride, 6);
}

TEST_F(TwoWeights, MayNotBeTheOutput) {
  wide.data = options.w_up.data;
  expect_refused({"y overlaps w_up"});
}

TEST_F(TwoWeights, AreForPlainForwardsOnly) {
  expect_dx_refused(ErrorKind::kInvalidValue, {"w_up is given", "forward"});
  options.activation = Activation{};
  options.activation->layout = GateLayout::kInterleaved;
  expect_refused({"w_up is given with activation silu/interleaved", "concatenated"});
  options.activation.reset();
  options.autotune = true;
  expect_refused({"w_up is given with autotune"});
}

}  // namespace
}  // namespace moegemm
