#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "moegemm/passes.h"
#include "unit/core/expect_refusal.h"

namespace moegemm {
namespace {

using testing::expect_refusal;

/// T = 3, topk = 2, E = 2, M = 6, I = 4, H = 5: each test breaks one thing.
class ActivationRules : public ::testing::Test {
 protected:
  void forward() const {
    activate(inputs.pre, inputs.bias, {routing.m_sizes, {}, {}, 1}, activation, act);
  }
  void backward() const { activate_backward(inputs, routing, activation, outputs); }
  void sums() const { expert_sums(inputs.d_out, routing, sums_out); }

  static TensorView matrix(std::vector<float>& data, std::int64_t rows, std::int64_t cols) {
    data.assign(rows * cols, 0.5f);
    return TensorView::matrix(data.data(), DType::kFloat32, rows, cols);
  }

  std::vector<std::int32_t> sizes = {2, 4}, order = {5, 4, 3, 2, 1, 0};
  std::vector<float> data[11];
  std::vector<float> weights = std::vector<float>(6, 1.0f), slots = std::vector<float>(6);
  Activation activation;
  RoutingView routing{TensorView::vector(sizes.data(), DType::kInt32, 2),
                      TensorView::vector(order.data(), DType::kInt32, 6),
                      TensorView::vector(weights.data(), DType::kFloat32, 6), 2};
  TensorView act = matrix(data[0], 6, 4);
  ActivationGradientInputs inputs{matrix(data[1], 6, 4), matrix(data[2], 6, 8),
                                  matrix(data[3], 2, 8), matrix(data[4], 3, 5),
                                  matrix(data[5], 2, 5)};
  ActivationGradientOutputs outputs{matrix(data[6], 6, 8), matrix(data[7], 6, 4),
                                    TensorView::vector(slots.data(), DType::kFloat32, 6)};
  TensorView sums_out = matrix(data[8], 2, 5);
};

TEST_F(ActivationRules, ValidArgumentsAreAccepted) {
  EXPECT_NO_THROW(forward());
  EXPECT_NO_THROW(backward());
  EXPECT_NO_THROW(sums());
}

TEST_F(ActivationRules, WeightedActivationMayReplaceItsGradient) {
  outputs.weighted_act = inputs.d_act;
  EXPECT_NO_THROW(backward());
  outputs.d_pre = inputs.pre;
  expect_refusal(ErrorKind::kInvalidValue, {"d_pre", "pre"}, [this] { backward(); });
}

TEST_F(ActivationRules, AGateNeedsAnEvenNumberOfColumns) {
  inputs.pre.shape[1] = 7;
  expect_refusal(ErrorKind::kInvalidValue, {"pre has 7 columns", "even"}, [this] { forward(); });
  expect_refusal(ErrorKind::kInvalidValue, {"pre has 7 columns", "even"}, [this] { backward(); });
}

TEST_F(ActivationRules, NumbersMustMakeSense) {
  for (const float limit : {0.0f, -1.0f, std::nanf("")}) {
    activation.limit = limit;
    expect_refusal(ErrorKind::kInvalidValue, {"limit is", "positive"}, [this] { forward(); });
  }
  activation = {};
  activation.alpha = INFINITY;
  expect_refusal(ErrorKind::kInvalidValue, {"alpha is inf", "finite"}, [this] { forward(); });
  activation = {};
  activation.up_offset = std::nanf("");
  expect_refusal(ErrorKind::kInvalidValue, {"up_offset is nan"}, [this] { backward(); });
}

TEST_F(ActivationRules, ShapesFollowTheFirstProduct) {
  act.shape[1] = 3;
  expect_refusal(ErrorKind::kInvalidValue, {"act is", "[M, I] = [6, 4]"}, [this] { forward(); });
  inputs.bias.shape[0] = 1;
  expect_refusal(ErrorKind::kInvalidValue, {"bias is", "[E, C] = [2, 8]"}, [this] { backward(); });
}

TEST_F(ActivationRules, DownBiasComesWithItsGradientAndSomewhereToAddTo) {
  ActivationGradientInputs all = inputs;
  inputs.d_out = {};
  expect_refusal(ErrorKind::kInvalidValue, {"d_out and down_bias go together", "only down_bias"},
                 [this] { backward(); });
  inputs = all;
  outputs.d_weights = {};
  expect_refusal(ErrorKind::kInvalidValue, {"down_bias", "without d_weights"},
                 [this] { backward(); });
}

TEST_F(ActivationRules, SlotsAreThoseOfWholeTokens) {
  inputs.d_out.shape[0] = 2;
  expect_refusal(ErrorKind::kInvalidValue, {"d_out has 2 rows", "T = M / topk = 6 / 2"},
                 [this] { backward(); });
  routing.router_weights.shape[0] = outputs.d_weights.shape[0] = 5;
  expect_refusal(ErrorKind::kInvalidValue, {"router_weights has 5 elements", "topk = 2"},
                 [this] { backward(); });
  routing.router_weights = {};
  expect_refusal(ErrorKind::kInvalidValue, {"d_weights has 5 elements", "topk = 2"},
                 [this] { backward(); });
}

TEST_F(ActivationRules, FlatOrderNeedsIndices) {
  routing.gather_indices = {};
  expect_refusal(ErrorKind::kInvalidValue, {"gather_indices is not given"}, [this] { backward(); });
  expect_refusal(ErrorKind::kInvalidValue, {"gather_indices is not given"}, [this] { sums(); });
  routing.router_weights = {};
  outputs.d_weights = inputs.d_out = inputs.down_bias = {};
  EXPECT_NO_THROW(backward());
}

TEST_F(ActivationRules, RowsWithoutIndicesHaveAWeightEach) {
  RoutingView by_row{routing.m_sizes, {}, routing.router_weights, 1};
  EXPECT_NO_THROW(activate(inputs.pre, inputs.bias, by_row, activation, act));
  routing = by_row;
  inputs.d_out = matrix(data[9], 6, 5);
  EXPECT_NO_THROW(backward());
  routing.router_weights.shape[0] = 5;
  outputs.d_weights.shape[0] = 5;
  expect_refusal(ErrorKind::kInvalidValue, {"gather_indices is not given", "5 weights and 6 rows"},
                 [this] { backward(); });
  expect_refusal(ErrorKind::kInvalidValue, {"router_weights is", "M = 6"},
                 [&] { activate(inputs.pre, inputs.bias, routing, activation, act); });
}

TEST_F(ActivationRules, AWeightedBiasIsAddedToRowsOfItsShape) {
  const RoutingView by_row{routing.m_sizes, {}, routing.router_weights, 1};
  TensorView rows = matrix(data[9], 6, 5);
  const TensorView out = matrix(data[10], 6, 5);
  const auto add = [&] { add_weighted_bias(rows, inputs.down_bias, by_row, out); };
  EXPECT_NO_THROW(add());
  rows = out;
  EXPECT_NO_THROW(add());
  rows.shape[1] = 4;
  expect_refusal(ErrorKind::kInvalidValue, {"rows is", "[M, C] = [6, 5]"}, add);
  rows = matrix(data[9], 6, 5);
  inputs.down_bias.shape[0] = 3;
  expect_refusal(ErrorKind::kInvalidValue, {"bias is", "[E, C] = [2, 5]"}, add);
}

TEST(ActivationNames, AreThoseOfTheInterface) {
  EXPECT_STREQ(to_string(ActivationFunction::kGeluTanh), "gelu_tanh");
  EXPECT_STREQ(to_string(GateLayout::kInterleaved), "interleaved");
  EXPECT_EQ(Activation{}.input_columns(12), 24);
  EXPECT_EQ((Activation{.layout = GateLayout::kNone}).input_columns(12), 12);
}

TEST(ActivationText, EveryFunctionAndLayoutComesBack) {
  for (const auto& function : kActivationFunctions) {
    for (const auto& layout : kGateLayouts) {
      const Activation plain = {.function = function.value, .layout = layout.value};
      EXPECT_EQ(parse_activation(to_string(plain)), plain);
      const Activation numbers = {function.value, layout.value, 1.702f, 7.0f, 1.0f};
      EXPECT_EQ(parse_activation(to_string(numbers)), numbers);
    }
  }
}

TEST(ActivationText, OtherNamesAreRefusedWithThoseThatThereAre) {
  expect_refusal(ErrorKind::kInvalidValue, {"activation is 'swish'", "silu, gelu", " and "},
                 [] { parse_activation("swish/none"); });
  expect_refusal(ErrorKind::kInvalidValue,
                 {"layout is ''; accepted are none, concatenated and interleaved"},
                 [] { parse_activation("silu/"); });
}

}  // namespace
}  // namespace moegemm
