#include <limits>
#include <vector>

#include "unit/core/validation/valid_call.h"

namespace moegemm {
namespace {

constexpr Device kGpu{DeviceType::kCuda, 0};

class ValidateTensors : public testing::ValidCall {};

// One tensor at a time

TEST_F(ValidateTensors, MissingTensorsAreNamed) {
  testing::expect_refusal(ErrorKind::kInvalidValue, {"y is not given"},
                          [this] { described_call(Op::kForward, x, w, {}); });
  x = {};
  expect_forward_refused(ErrorKind::kInvalidValue, {"x is not given"});
  dy = {};
  expect_dx_refused(ErrorKind::kInvalidValue, {"dy is not given"});
  routing.m_sizes = {};
  x = x_tokens;
  expect_forward_refused(ErrorKind::kInvalidValue, {"m_sizes is not given"});
}

TEST_F(ValidateTensors, WrongRankIsNamed) {
  x = TensorView::vector(x_data.data(), kType, 60);
  expect_forward_refused(ErrorKind::kInvalidValue,
                         {"x is fp32[60]", "its shape must be [T, K] or [M, K]"});
  w = TensorView::vector(w_data.data(), kType, 60);
  expect_dx_refused(ErrorKind::kInvalidValue,
                    {"w is fp32[60]", "its shape must be [E, N, K] or [E * N, K]"});
}

TEST_F(ValidateTensors, NegativeExtentIsRefused) {
  x.shape[0] = -1;
  expect_forward_refused(ErrorKind::kInvalidValue, {"x has shape[0] = -1", "negative"});
}

TEST_F(ValidateTensors, RowStrideBelowTheRowLengthIsRefused) {
  x.row_stride = 4;
  expect_forward_refused(ErrorKind::kInvalidValue, {"x has row_stride 4", "at least", "5"});
}

TEST_F(ValidateTensors, RowsFurtherApartThan32BitsCountAreSaidToBe) {
  constexpr std::int64_t kGibi = std::int64_t{1} << 30;       // times four bytes
  x.data = reinterpret_cast<void*>(std::uintptr_t{1} << 50);  // apart from all other tensors
  for (const std::int64_t near :
       {std::int64_t{5}, kGibi - 1, kGibi, 2 * kGibi + 2, 16 * kGibi - 4}) {
    x.row_stride = near;
    EXPECT_FALSE(forward().problem.far_apart) << near;
    EXPECT_FALSE(dw().problem.far_apart) << near;
  }
  for (const std::int64_t far : {4 * kGibi + 1, 8 * kGibi + 2, 16 * kGibi}) {
    x.row_stride = far;
    EXPECT_TRUE(forward().problem.far_apart) << far;
    EXPECT_TRUE(dw().problem.far_apart) << far;
    EXPECT_FALSE(dx().problem.far_apart) << "it does not read x";
  }
}

TEST_F(ValidateTensors, NullDataIsRefusedUnlessEmpty) {
  x.data = nullptr;
  expect_forward_refused(ErrorKind::kInvalidValue, {"x is fp32[12, 5]", "null data pointer"});
}

TEST_F(ValidateTensors, ElementCountsBeyond64BitsAreRefused) {
  x.shape = {std::int64_t{1} << 62, 5};
  expect_forward_refused(ErrorKind::kInvalidValue, {"x is", "element count", "64 bits"});
  x.shape = {std::int64_t{1} << 60, 5};
  y.shape[0] = x.shape[0];
  expect_forward_refused(ErrorKind::kInvalidValue, {"bytes of M * max(N, K)", "64 bits"});
  x = x_tokens;
  y.shape[0] = x.shape[0];
  x.row_stride = std::numeric_limits<std::int64_t>::max();
  expect_forward_refused(ErrorKind::kInvalidValue, {"x is", "byte count", "64 bits"});
}

// dtypes

TEST_F(ValidateTensors, IntegerOperandIsRefused) {
  x.dtype = DType::kInt32;
  expect_forward_refused(ErrorKind::kInvalidType, {"x has dtype int32", "bf16, fp16 and fp32"});
}

TEST_F(ValidateTensors, OperandDtypesMustAgree) {
  w.dtype = DType::kBFloat16;
  expect_forward_refused(ErrorKind::kInvalidType,
                         {"w has dtype bf16", "it must have fp32, the dtype of x"});
  expect_dx_refused(ErrorKind::kInvalidType,
                    {"w has dtype bf16", "it must have fp32, the dtype of dy"});
  x.dtype = DType::kFloat16;
  expect_dw_refused(ErrorKind::kInvalidType,
                    {"x has dtype fp16", "it must have fp32, the dtype of dy"});
}

TEST_F(ValidateTensors, OutputIsInTheInputDtypeOrFloat32) {
  x.dtype = w.dtype = dy.dtype = DType::kBFloat16;
  EXPECT_EQ(forward().problem.out_dtype, DType::kFloat32);
  EXPECT_EQ(dx().problem.out_dtype, DType::kFloat32);
  EXPECT_EQ(dw().problem.out_dtype, DType::kFloat32);
  y.dtype = dx_out.dtype = dw_out.dtype = DType::kFloat16;
  expect_forward_refused(ErrorKind::kInvalidType,
                         {"y has dtype fp16", "fp32 and bf16, the dtype of x"});
  expect_dx_refused(ErrorKind::kInvalidType,
                    {"dx has dtype fp16", "fp32 and bf16, the dtype of dy"});
  expect_dw_refused(ErrorKind::kInvalidType,
                    {"dw has dtype fp16", "fp32 and bf16, the dtype of dy"});
}

TEST_F(ValidateTensors, SizesAndIndicesAreIntegers) {
  options.permute_y = true;
  routing.gather_indices.dtype = DType::kFloat32;
  expect_forward_refused(ErrorKind::kInvalidType,
                         {"gather_indices has dtype fp32", "int32 and int64"});
  routing.m_sizes.dtype = DType::kBFloat16;
  expect_forward_refused(ErrorKind::kInvalidType, {"m_sizes has dtype bf16", "int32 and int64"});
}

TEST_F(ValidateTensors, WeightsAreFloat32OrTheInputDtype) {
  options.permute_y = options.multiply = true;
  x.dtype = w.dtype = DType::kBFloat16;
  EXPECT_EQ(forward().problem.weights_dtype, DType::kFloat32);
  routing.router_weights.dtype = DType::kBFloat16;
  EXPECT_EQ(forward().problem.weights_dtype, DType::kBFloat16);
  routing.router_weights.dtype = DType::kFloat16;
  expect_forward_refused(ErrorKind::kInvalidType,
                         {"router_weights has dtype fp16", "fp32 and bf16, the dtype of x"});
}

// Devices

TEST_F(ValidateTensors, EveryTensorMustBeOnTheDeviceOfTheFirst) {
  options.permute_y = options.multiply = true;
  const auto refused_elsewhere = [this](TensorView& view, const char* name) {
    view.device = kGpu;
    expect_forward_refused(ErrorKind::kInvalidType, {name, "is on cuda:0", "on cpu, where x is"});
    view.device = {};
  };
  refused_elsewhere(w, "w");
  refused_elsewhere(y, "y");
  refused_elsewhere(routing.m_sizes, "m_sizes");
  refused_elsewhere(routing.gather_indices, "gather_indices");
  refused_elsewhere(routing.router_weights, "router_weights");
  x.device = kGpu;
  expect_dw_refused(ErrorKind::kInvalidType, {"x is on cuda:0", "on cpu, where dy is"});
}

// Shapes

TEST_F(ValidateTensors, NoExpertsAreRefused) {
  routing.m_sizes.shape[0] = 0;
  expect_forward_refused(ErrorKind::kInvalidValue, {"m_sizes is int32[0]", "E must be at least 1"});
}

TEST_F(ValidateTensors, WeightsOfAnotherExpertCountAreRefused) {
  w = TensorView::stack(w_data.data(), kType, 2, 4, 5);
  expect_forward_refused(ErrorKind::kInvalidValue,
                         {"w is fp32[2, 4, 5]", "E = 3 entries of m_sizes"});
  expect_dx_refused(ErrorKind::kInvalidValue, {"w is fp32[2, 4, 5]", "E = 3"});
}

TEST_F(ValidateTensors, FlattenedWeightsMustDivideByTheExperts) {
  w = TensorView::matrix(w_data.data(), kType, 11, 5);
  expect_forward_refused(ErrorKind::kInvalidValue, {"w is fp32[11, 5]", "multiple of E = 3"});
  expect_dx_refused(ErrorKind::kInvalidValue, {"w is fp32[11, 5]", "multiple of E = 3"});
}

TEST_F(ValidateTensors, ContractionLengthsMustAgree) {
  w = TensorView::stack(w_data.data(), kType, 3, 5, 4);
  y = TensorView::matrix(y_data.data(), kType, 12, 5);
  expect_forward_refused(ErrorKind::kInvalidValue,
                         {"x is fp32[12, 5]", "must be K = 4 as in w (fp32[3, 5, 4]"});
  expect_dx_refused(ErrorKind::kInvalidValue, {"dy is fp32[12, 4]", "must be N = 5 as in w"});
}

TEST_F(ValidateTensors, OutputShapesAreChecked) {
  y.shape[0] = 11;
  expect_forward_refused(ErrorKind::kInvalidValue, {"y is fp32[11, 4]", "[M, N] = [12, 4]"});
  dx_out.shape[0] = 11;
  expect_dx_refused(ErrorKind::kInvalidValue, {"dx is fp32[11, 5]", "[M, K] = [12, 5]"});
  dw_out.shape = {3, 5, 4};
  expect_dw_refused(ErrorKind::kInvalidValue, {"dw is fp32[3, 5, 4]", "[E, N, K] = [3, 4, 5]"});
  dw_out = TensorView::matrix(out_data.data(), kType, 11, 5);
  expect_dw_refused(ErrorKind::kInvalidValue, {"dw is fp32[11, 5]", "[E * N, K] = [12, 5]"});
}

TEST_F(ValidateTensors, IndicesOfAnyLengthAreACapacityWithPermuteX) {
  options.permute_x = true;
  EXPECT_EQ(forward().problem.slots, 24);  // 12 tokens and topk 2, but 12 indices
  EXPECT_EQ(dw().problem.slots, 24);
  x = x_tokens;
  EXPECT_EQ(forward().problem.slots, -1);
  dx_out.shape[0] = 10;
  EXPECT_EQ(dx().problem.slots, 10);
  EXPECT_EQ(dx().problem.rows, 12);
  dx_out.shape[0] = 11;
  expect_dx_refused(ErrorKind::kInvalidValue, {"dx is fp32[11, 5]", "T * topk rows, topk = 2"});
}

TEST_F(ValidateTensors, AnOutputOfAnyLengthHasTheFlatRowsOfACapacityWithPermuteY) {
  options.permute_y = true;
  EXPECT_EQ(forward().problem.slots, -1);
  y.shape[0] = 10;
  EXPECT_EQ(forward().problem.slots, 10);
  EXPECT_EQ(forward().problem.rows, 12);
  y.shape[0] = 11;
  expect_forward_refused(ErrorKind::kInvalidValue, {"y is fp32[11, 4]", "T * topk rows, topk = 2"});
}

TEST_F(ValidateTensors, IndicesOfAnyLengthAreACapacityWithDyPerToken) {
  options.permute_y = options.dy_per_token = true;
  EXPECT_EQ(dx().problem.slots, 24);
  EXPECT_EQ(dw().problem.slots, 24);
}

TEST_F(ValidateTensors, XHasOneRowForEachPositionWithoutPermuteX) {
  x = x_tokens;
  expect_dw_refused(ErrorKind::kInvalidValue, {"x is fp32[6, 5]", "without permute_x", "M = 12"});
}

TEST_F(ValidateTensors, IndicesHaveOneEntryPerRow) {
  options.permute_y = true;
  routing.gather_indices.shape[0] = 11;
  expect_forward_refused(ErrorKind::kInvalidValue,
                         {"gather_indices is int32[11]", "M = 12, the rows of x"});
}

TEST_F(ValidateTensors, WeightsHaveOneEntryPerRowInEitherShape) {
  options.permute_y = options.multiply = true;
  routing.router_weights = TensorView::matrix(weights.data(), DType::kFloat32, 6, 2);
  EXPECT_TRUE(forward().problem.multiply);
  routing.router_weights = TensorView::matrix(weights.data(), DType::kFloat32, 2, 6);
  expect_forward_refused(ErrorKind::kInvalidValue,
                         {"router_weights is fp32[2, 6]", "[T, topk] with M = 12"});
  routing.router_weights = TensorView::vector(weights.data(), DType::kFloat32, 6);
  expect_forward_refused(ErrorKind::kInvalidValue,
                         {"router_weights is fp32[6]", "[M] or [T, topk] with M = 12"});
  routing.router_weights = TensorView::matrix(weights.data(), DType::kFloat32, 6, 2, 3);
  expect_forward_refused(ErrorKind::kInvalidValue, {"router_weights has row_stride 3", "dense"});
}

TEST_F(ValidateTensors, TwoDimensionalWeightsNeedWholeTokens) {
  options.permute_y = options.multiply = true;
  routing.topk = 5;
  routing.router_weights = TensorView::matrix(weights.data(), DType::kFloat32, 2, 5);
  expect_forward_refused(ErrorKind::kInvalidValue, {"router_weights", "M = 12", "topk = 5"});
}

TEST_F(ValidateTensors, ZeroColumnsAreRefused) {
  x = TensorView::matrix(x_data.data(), kType, 12, 0);
  w = TensorView::stack(w_data.data(), kType, 3, 4, 0);
  expect_forward_refused(ErrorKind::kInvalidValue, {"w is fp32[3, 4, 0]", "K must be at least 1"});
  dy = TensorView::matrix(dy_data.data(), kType, 12, 0);
  w = TensorView::stack(w_data.data(), kType, 3, 0, 5);
  expect_dx_refused(ErrorKind::kInvalidValue, {"w is fp32[3, 0, 5]", "N must be at least 1"});
}

// Overlap

TEST_F(ValidateTensors, OutputOverAnInputIsRefused) {
  y.data = x_data.data() + 59;  // the last element of x
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps x in memory", "separate"});
  y.data = w_data.data();
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps w"});
  dw_out.data = dy_data.data();
  expect_dw_refused(ErrorKind::kInvalidValue, {"dw overlaps dy"});
  y.data = sizes.data();
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps m_sizes"});
  options.permute_y = options.multiply = true;
  y.data = indices.data();
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps gather_indices"});
  y.data = weights.data();
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps router_weights"});
}

TEST_F(ValidateTensors, OutputRightBehindAnInputIsAccepted) {
  std::vector<float> buffer(12 * 5 + 12 * 4);
  x.data = buffer.data();
  y.data = buffer.data() + 12 * 5;
  EXPECT_NO_THROW(forward());
}

TEST_F(ValidateTensors, ColumnRangesOfOneBufferAreAcceptedWhenTheyAreDisjoint) {
  std::vector<float> buffer(12 * 9);
  x = TensorView::matrix(buffer.data(), kType, 12, 5, 9);
  y = TensorView::matrix(buffer.data() + 5, kType, 12, 4, 9);
  EXPECT_NO_THROW(forward());
  y.data = buffer.data() + 4;
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps x"});
  // Y's rows wrap into the next row of X.
  y.data = buffer.data() + 6;
  y.shape[0] = x.shape[0] = 11;
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps x"});
}

TEST_F(ValidateTensors, RowsOfDifferentPitchesAreComparedOneByOne) {
  std::vector<float> buffer(12 * 40);
  x = TensorView::matrix(buffer.data(), kType, 12, 5, 20);
  y = TensorView::matrix(buffer.data() + 5, kType, 12, 4, 40);  // beside every second row of X
  EXPECT_NO_THROW(forward());
  y.data = buffer.data() + 24;
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps x"});
  y = TensorView::matrix(buffer.data() + 220, kType, 12, 4, 9);  // over the last row of X alone
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps x"});
  y.data = buffer.data() + 225;
  EXPECT_NO_THROW(forward());
  y = TensorView::matrix(buffer.data() + 6, kType, 12, 4);  // dense, over gaps and rows
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps x"});
  x.shape[0] = y.shape[0] = 3;
  y.data = buffer.data() + 25;  // dense, in one gap
  EXPECT_NO_THROW(forward());
  x = TensorView::matrix(buffer.data() + 12, kType, 3, 5);
  y = TensorView::matrix(buffer.data(), kType, 3, 4, 13);
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps x"});
}

}  // namespace
}  // namespace moegemm
