#include "moegemm/describe.h"

#include "unit/core/validation/valid_call.h"

namespace moegemm {
namespace {

using testing::expect_refusal;

/// The same rules without memory: views have no data.
class Describe : public testing::ValidCall {
 protected:
  Describe() {
    for (TensorView* view : {&x, &x_tokens, &w, &dy, &y, &routing.m_sizes, &routing.gather_indices,
                             &routing.router_weights}) {
      view->data = nullptr;
    }
  }
};

TEST_F(Describe, GivesTheOutputOfEachOp) {
  const Description forward = describe(Op::kForward, x, w, routing, options);
  EXPECT_EQ(forward.out_rank, 2);
  EXPECT_EQ(forward.out_shape, (std::array<std::int64_t, 3>{12, 4}));
  EXPECT_EQ(describe(Op::kDx, dy, w, routing, options).out_shape,
            (std::array<std::int64_t, 3>{12, 5}));
  const Description dw = describe(Op::kDw, dy, x, routing, options);
  EXPECT_EQ(dw.out_rank, 3);
  EXPECT_EQ(dw.out_shape, (std::array<std::int64_t, 3>{3, 4, 5}));
  options.activation = Activation{};
  EXPECT_EQ(describe(Op::kForward, x, w, routing, options).out_shape[1], 2);
}

TEST_F(Describe, SpeaksTheCallersLanguage) {
  const CallerWords words{.x = "X",
                          .w = "W",
                          .out = "result",
                          .router_weights = "router_weights",
                          .multiply = "multiply_post",
                          .yes = "True",
                          .no = "False",
                          .none = "None"};
  const auto refused = [&](std::initializer_list<const char*> parts, const TensorView& out = {}) {
    expect_refusal(ErrorKind::kInvalidValue, parts,
                   [&] { describe(Op::kForward, x, w, routing, options, out, words); });
  };
  y.shape[1] = 3;
  refused({"result is fp32[12, 3]", "[M, N] = [12, 4]"}, y);
  options.multiply = true;
  refused({"multiply_post=True with permute_y=False; it needs permute_y=True"});
  options.permute_y = true;
  routing.router_weights = {};
  refused({"router_weights is None; multiply_post=True needs it"});
  routing.gather_indices = {};
  refused({"gather_indices is None; permute_y=True needs it"});
  options = {};
  w.shape[2] = 6;
  refused({"X is fp32[12, 5]", "K = 6 as in W"});
}

TEST_F(Describe, AccumulatesIntoWhatIsGivenOnly) {
  options.accumulate = true;
  expect_refusal(ErrorKind::kInvalidValue, {"accumulate=true with dw=not given"},
                 [&] { describe(Op::kDw, dy, x, routing, options); });
}

TEST_F(Describe, LeavesMemoryToTheRun) {
  x.row_stride = 1;
  const Description description = describe(Op::kForward, x, w, routing, options);
  expect_refusal(ErrorKind::kInvalidValue, {"x has row_stride 1", "at least the row length 5"},
                 [&] { run(description, x, w, y, routing, options, {}); });
}

class LayerRules : public ::testing::Test {
 protected:
  void expect_refused(ErrorKind kind, std::initializer_list<const char*> parts) const {
    expect_refusal(kind, parts, [this] { check_layer(views, Activation{}, layout); });
  }
  static TensorView matrix(std::int64_t rows, std::int64_t columns,
                           DType dtype = DType::kBFloat16) {
    return TensorView::matrix(nullptr, dtype, rows, columns);
  }
  static TensorView stack(std::int64_t count, std::int64_t rows, std::int64_t columns) {
    return TensorView::stack(nullptr, DType::kBFloat16, count, rows, columns);
  }

  // T = 6, H = 8, I = 5, E = 3, topk = 2
  LayerViews views{matrix(6, 8),
                   {stack(3, 10, 8), stack(3, 8, 5), matrix(3, 10), matrix(3, 8)},
                   matrix(6, 2, DType::kInt64),
                   matrix(6, 2, DType::kFloat32)};
  WeightLayout layout = WeightLayout::kNk;
};

TEST_F(LayerRules, HoldForEitherLayout) {
  EXPECT_NO_THROW(check_layer(views, Activation{}, layout));
  expect_refusal(ErrorKind::kInvalidValue, {"w_down is bf16[3, 8, 5]", "[E, I, H] = [3, 8, 8]"},
                 [&] { check_layer(views, Activation{}, WeightLayout::kKn); });
  views.weights.w_gate_up = stack(3, 8, 10);
  views.weights.w_down = stack(3, 5, 8);
  EXPECT_NO_THROW(check_layer(views, Activation{}, WeightLayout::kKn));
}

TEST_F(LayerRules, GatesAndUpsMayBeApart) {
  views.weights.w_gate_up = views.weights.w_up = stack(3, 5, 8);
  EXPECT_NO_THROW(check_layer(views, Activation{}, layout));
  views.weights.w_up = stack(3, 6, 8);
  expect_refused(ErrorKind::kInvalidValue,
                 {"w_gate_up[1] is bf16[3, 6, 8]", "[E, I, H] = [3, 5, 8]"});
  views.weights.w_up = stack(3, 5, 8);
  expect_refusal(ErrorKind::kInvalidValue, {"w_gate_up[1] is given", "concatenated"}, [&] {
    check_layer(views, Activation{.layout = GateLayout::kInterleaved}, layout);
  });
}

TEST_F(LayerRules, OfRowsInExpertOrder) {
  ExpertRowsViews rows{views.x, views.weights, TensorView::vector(nullptr, DType::kInt64, 3),
                       TensorView::vector(nullptr, DType::kFloat32, 6)};
  const auto check = [&] { check_expert_rows(rows, Activation{}, layout); };
  EXPECT_NO_THROW(check());
  rows.row_weights = TensorView::vector(nullptr, DType::kFloat32, 5);
  expect_refusal(ErrorKind::kInvalidValue, {"row_weights is fp32[5]", "[R] = [6]"}, check);
  rows.sizes = TensorView::vector(nullptr, DType::kInt64, 4);
  expect_refusal(ErrorKind::kInvalidValue, {"sizes is int64[4]", "[E] = [3]"}, check);
}

TEST_F(LayerRules, NameTheArgument) {
  views.router_weights = matrix(6, 3, DType::kFloat32);
  expect_refused(ErrorKind::kInvalidValue, {"router_weights", "[T, topk] = [6, 2]"});
  views.expert_ids = matrix(6, 2, DType::kFloat32);
  expect_refused(ErrorKind::kInvalidType, {"expert_ids has dtype fp32", "int32 and int64"});
  views.weights.down_bias = matrix(3, 7);
  expect_refused(ErrorKind::kInvalidValue, {"down_bias", "[E, H] = [3, 8]"});
  views.weights.gate_up_bias = matrix(3, 10, DType::kFloat16);
  expect_refused(ErrorKind::kInvalidType, {"gate_up_bias has dtype fp16", "bf16, the dtype of x"});
  views.weights.w_gate_up = stack(3, 5, 8);
  expect_refused(ErrorKind::kInvalidValue, {"w_gate_up", "[E, C, H] = [3, 10, 8]"});
  views.weights.w_down.device = {DeviceType::kCuda, 0};
  expect_refused(ErrorKind::kInvalidType, {"w_down is on cuda:0", "on cpu, where x is"});
  views.x = matrix(6, 0);
  views.weights.w_down.device = {};
  expect_refused(ErrorKind::kInvalidValue, {"x is bf16[6, 0]", "H must be at least 1"});
}

}  // namespace
}  // namespace moegemm
