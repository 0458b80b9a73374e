#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "core/validation/validate.h"
#include "unit/core/expect_refusal.h"

namespace moegemm {
namespace {

using testing::expect_refusal;

constexpr Device kGpu{DeviceType::kCuda, 0};

/// A valid call of each op: E = 3, N = 4, K = 5, T = 6, topk = 2, M = 12. Tests break one thing.
class Validate : public ::testing::Test {
 protected:
  Validate() {
    routing.m_sizes = TensorView::vector(sizes.data(), DType::kInt32, 3);
    routing.gather_indices = TensorView::vector(indices.data(), DType::kInt32, 12);
    routing.topk_weights = TensorView::vector(weights.data(), DType::kFloat32, 12);
    routing.topk = 2;
  }

  Call forward() const { return describe_forward(x, w, y, routing, options); }
  Call dx() const { return describe_dx(dy, w, dx_out, routing, options); }
  Call dw() const { return describe_dw(dy, x, dw_out, routing, options); }

  void expect_forward_refused(ErrorKind kind, std::initializer_list<const char*> parts) const {
    expect_refusal(kind, parts, [this] { forward(); });
  }
  void expect_dx_refused(ErrorKind kind, std::initializer_list<const char*> parts) const {
    expect_refusal(kind, parts, [this] { dx(); });
  }
  void expect_dw_refused(ErrorKind kind, std::initializer_list<const char*> parts) const {
    expect_refusal(kind, parts, [this] { dw(); });
  }

  static constexpr DType kType = DType::kFloat32;
  std::vector<float> x_data = std::vector<float>(12 * 8);
  std::vector<float> w_data = std::vector<float>(3 * 4 * 5);
  std::vector<float> y_data = std::vector<float>(12 * 8);
  std::vector<float> dy_data = std::vector<float>(12 * 4);
  std::vector<float> out_data = std::vector<float>(12 * 8);
  // Longer than their views: an output laid over one of them must not reach into the next.
  std::vector<std::int32_t> sizes = std::vector<std::int32_t>(64, 4);
  std::vector<std::int32_t> indices = std::vector<std::int32_t>(64);
  std::vector<float> weights = std::vector<float>(64);

  TensorView x = TensorView::matrix(x_data.data(), kType, 12, 5);
  TensorView x_tokens = TensorView::matrix(x_data.data(), kType, 6, 5);
  TensorView w = TensorView::stack(w_data.data(), kType, 3, 4, 5);
  TensorView y = TensorView::matrix(y_data.data(), kType, 12, 4);
  TensorView dy = TensorView::matrix(dy_data.data(), kType, 12, 4);
  TensorView dx_out = TensorView::matrix(out_data.data(), kType, 12, 5);
  TensorView dw_out = TensorView::stack(out_data.data(), kType, 3, 4, 5);
  RoutingView routing;
  GemmOptions options;
};

TEST_F(Validate, ValidCallsAreDescribed) {
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
    EXPECT_EQ(call.operands.topk_weights, nullptr) << "not read without fuse_mul";
  }
  EXPECT_EQ(forward().problem.op, Op::kForward);
  EXPECT_EQ(dx().problem.op, Op::kDx);
  EXPECT_EQ(dw().problem.op, Op::kDw);
}

TEST_F(Validate, OperandsCarryPointersAndStrides) {
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

TEST_F(Validate, PermuteXReadsOneRowPerToken) {
  options.permute_x = true;
  x = x_tokens;
  routing.gather_indices.dtype = DType::kInt64;
  EXPECT_EQ(forward().problem.rows, 12);
  EXPECT_EQ(forward().problem.index_dtype, DType::kInt64);
  EXPECT_EQ(dw().problem.rows, 12);
  EXPECT_EQ(dw().operands.gather_indices, indices.data());
}

TEST_F(Validate, DyPerTokenReadsOneRowPerToken) {
  options.permute_y = options.dy_per_token = true;
  EXPECT_THROW(dx(), Error) << "12 rows are not 12 / 2";
  EXPECT_THROW(dw(), Error);
  EXPECT_THROW(forward(), Error) << "it has no dy";
  dy.shape[0] = 6;
  EXPECT_EQ(dx().problem.rows, 12);
  EXPECT_EQ(dw().problem.rows, 12);
  EXPECT_EQ(dx().problem.gather_divisor(), 2);
  options.permute_y = false;
  EXPECT_THROW(dx(), Error) << "nothing is gathered";
}

TEST_F(Validate, FlattenedWeightsAreTheSameProblem) {
  const Problem stacked = forward().problem;
  w = TensorView::matrix(w_data.data(), kType, 12, 5);
  EXPECT_EQ(forward().problem, stacked);
  EXPECT_EQ(dx().problem.n, 4);
  dw_out = TensorView::matrix(out_data.data(), kType, 12, 5);
  EXPECT_EQ(dw().problem.n, 4);
}

TEST_F(Validate, ZeroRowsAreAccepted) {
  x = TensorView::matrix(nullptr, kType, 0, 5);
  y = TensorView::matrix(nullptr, kType, 0, 4);
  dy = TensorView::matrix(nullptr, kType, 0, 4);
  dx_out = TensorView::matrix(nullptr, kType, 0, 5);
  routing.gather_indices = TensorView::vector(nullptr, DType::kInt32, 0);
  routing.topk_weights = TensorView::vector(nullptr, DType::kFloat32, 0);
  EXPECT_EQ(forward().problem.rows, 0);
  EXPECT_EQ(dx().problem.rows, 0);
  EXPECT_EQ(dw().problem.rows, 0);
  options.permute_y = options.fuse_mul = true;
  EXPECT_EQ(forward().problem.rows, 0);
}

TEST_F(Validate, AlignmentIsThatOfTheWorstInput) {
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

TEST_F(Validate, BothPermutationsAreRefused) {
  options.permute_x = options.permute_y = true;
  expect_forward_refused(ErrorKind::kInvalidValue, {"permute_x", "permute_y", "both true"});
}

TEST_F(Validate, PermutationWithoutIndicesIsRefused) {
  routing.gather_indices = {};
  options.permute_x = true;
  expect_forward_refused(ErrorKind::kInvalidValue, {"gather_indices is not given", "permute_x"});
  options.permute_x = false;
  options.permute_y = true;
  expect_dx_refused(ErrorKind::kInvalidValue, {"gather_indices is not given", "permute_y"});
  expect_dw_refused(ErrorKind::kInvalidValue, {"gather_indices is not given", "permute_y"});
}

TEST_F(Validate, FuseMulNeedsPermuteY) {
  options.fuse_mul = true;
  expect_forward_refused(ErrorKind::kInvalidValue, {"fuse_mul is true", "needs permute_y"});
}

TEST_F(Validate, FuseMulNeedsWeights) {
  options.permute_y = options.fuse_mul = true;
  routing.topk_weights = {};
  expect_forward_refused(ErrorKind::kInvalidValue, {"topk_weights is not given", "fuse_mul"});
}

TEST_F(Validate, AccumulateIsForDwOnly) {
  options.accumulate = true;
  expect_forward_refused(ErrorKind::kInvalidValue, {"accumulate", "forward", "only dW"});
  expect_dx_refused(ErrorKind::kInvalidValue, {"accumulate", "dX", "only dW"});
  EXPECT_TRUE(dw().problem.accumulate);
}

TEST_F(Validate, AccumulateNeedsAFloat32Output) {
  x.dtype = dy.dtype = dw_out.dtype = DType::kBFloat16;
  options.accumulate = true;
  expect_dw_refused(ErrorKind::kInvalidType, {"dw has dtype bf16", "accumulate", "fp32"});
}

TEST_F(Validate, TopkBelowOneIsRefused) {
  routing.topk = 0;
  expect_forward_refused(ErrorKind::kInvalidValue, {"topk is 0", "at least 1"});
}

// One tensor at a time

TEST_F(Validate, MissingTensorsAreNamed) {
  x = {};
  expect_forward_refused(ErrorKind::kInvalidValue, {"x is not given"});
  dy = {};
  expect_dx_refused(ErrorKind::kInvalidValue, {"dy is not given"});
  routing.m_sizes = {};
  x = x_tokens;
  expect_forward_refused(ErrorKind::kInvalidValue, {"m_sizes is not given"});
}

TEST_F(Validate, WrongRankIsNamed) {
  x = TensorView::vector(x_data.data(), kType, 60);
  expect_forward_refused(ErrorKind::kInvalidValue, {"x has rank 1", "rank 2"});
  w = TensorView::vector(w_data.data(), kType, 60);
  expect_dx_refused(ErrorKind::kInvalidValue, {"w has rank 1", "rank 3 or 2"});
}

TEST_F(Validate, NegativeExtentIsRefused) {
  x.shape[0] = -1;
  expect_forward_refused(ErrorKind::kInvalidValue, {"x has shape[0] = -1", "negative"});
}

TEST_F(Validate, RowStrideBelowTheRowLengthIsRefused) {
  x.row_stride = 4;
  expect_forward_refused(ErrorKind::kInvalidValue, {"x has row_stride 4", "at least", "5"});
}

TEST_F(Validate, NullDataIsRefusedUnlessEmpty) {
  x.data = nullptr;
  expect_forward_refused(ErrorKind::kInvalidValue, {"x is fp32[12, 5]", "null data pointer"});
}

TEST_F(Validate, ElementCountsBeyond64BitsAreRefused) {
  x.shape = {std::int64_t{1} << 62, 5};
  expect_forward_refused(ErrorKind::kInvalidValue, {"x is", "element count", "64 bits"});
  x.shape = {std::int64_t{1} << 60, 5};
  expect_forward_refused(ErrorKind::kInvalidValue, {"x is", "byte count", "64 bits"});
  x = x_tokens;
  x.row_stride = std::numeric_limits<std::int64_t>::max();
  expect_forward_refused(ErrorKind::kInvalidValue, {"x is", "byte count", "64 bits"});
}

// dtypes

TEST_F(Validate, IntegerOperandIsRefused) {
  x.dtype = DType::kInt32;
  expect_forward_refused(ErrorKind::kInvalidType, {"x has dtype int32", "bf16, fp16 and fp32"});
}

TEST_F(Validate, OperandDtypesMustAgree) {
  w.dtype = DType::kBFloat16;
  expect_forward_refused(ErrorKind::kInvalidType, {"w has dtype bf16", "x's dtype, fp32"});
  expect_dx_refused(ErrorKind::kInvalidType, {"w has dtype bf16", "dy's dtype, fp32"});
  x.dtype = DType::kFloat16;
  expect_dw_refused(ErrorKind::kInvalidType, {"x has dtype fp16", "dy's dtype, fp32"});
}

TEST_F(Validate, OutputIsInTheInputDtypeOrFloat32) {
  x.dtype = w.dtype = dy.dtype = DType::kBFloat16;
  EXPECT_EQ(forward().problem.out_dtype, DType::kFloat32);
  EXPECT_EQ(dx().problem.out_dtype, DType::kFloat32);
  EXPECT_EQ(dw().problem.out_dtype, DType::kFloat32);
  y.dtype = dx_out.dtype = dw_out.dtype = DType::kFloat16;
  expect_forward_refused(ErrorKind::kInvalidType, {"y has dtype fp16", "bf16, or fp32"});
  expect_dx_refused(ErrorKind::kInvalidType, {"dx has dtype fp16", "bf16, or fp32"});
  expect_dw_refused(ErrorKind::kInvalidType, {"dw has dtype fp16", "bf16, or fp32"});
}

TEST_F(Validate, SizesAndIndicesAreIntegers) {
  options.permute_y = true;
  routing.gather_indices.dtype = DType::kFloat32;
  expect_forward_refused(ErrorKind::kInvalidType,
                         {"gather_indices has dtype fp32", "int32 and int64"});
  routing.m_sizes.dtype = DType::kBFloat16;
  expect_forward_refused(ErrorKind::kInvalidType, {"m_sizes has dtype bf16", "int32 and int64"});
}

TEST_F(Validate, WeightsAreFloat32OrTheInputDtype) {
  options.permute_y = options.fuse_mul = true;
  x.dtype = w.dtype = DType::kBFloat16;
  EXPECT_EQ(forward().problem.weights_dtype, DType::kFloat32);
  routing.topk_weights.dtype = DType::kBFloat16;
  EXPECT_EQ(forward().problem.weights_dtype, DType::kBFloat16);
  routing.topk_weights.dtype = DType::kFloat16;
  expect_forward_refused(ErrorKind::kInvalidType,
                         {"topk_weights has dtype fp16", "x's dtype, bf16, or fp32"});
}

// Devices

TEST_F(Validate, EveryTensorMustBeOnTheDeviceOfTheFirst) {
  options.permute_y = options.fuse_mul = true;
  const auto refused_elsewhere = [this](TensorView& view, const char* name) {
    view.device = kGpu;
    expect_forward_refused(ErrorKind::kInvalidType, {name, "is on cuda:0", "x's device, cpu"});
    view.device = {};
  };
  refused_elsewhere(w, "w");
  refused_elsewhere(y, "y");
  refused_elsewhere(routing.m_sizes, "m_sizes");
  refused_elsewhere(routing.gather_indices, "gather_indices");
  refused_elsewhere(routing.topk_weights, "topk_weights");
  x.device = kGpu;
  expect_dw_refused(ErrorKind::kInvalidType, {"x is on cuda:0", "dy's device, cpu"});
}

// Shapes

TEST_F(Validate, NoExpertsAreRefused) {
  routing.m_sizes.shape[0] = 0;
  expect_forward_refused(ErrorKind::kInvalidValue, {"m_sizes", "is 0", "at least 1"});
}

TEST_F(Validate, WeightsOfAnotherExpertCountAreRefused) {
  w = TensorView::stack(w_data.data(), kType, 2, 4, 5);
  expect_forward_refused(ErrorKind::kInvalidValue,
                         {"w is fp32[2, 4, 5]", "E = 3", "length of m_sizes"});
  expect_dx_refused(ErrorKind::kInvalidValue, {"w is fp32[2, 4, 5]", "E = 3"});
}

TEST_F(Validate, FlattenedWeightsMustDivideByTheExperts) {
  w = TensorView::matrix(w_data.data(), kType, 11, 5);
  expect_forward_refused(ErrorKind::kInvalidValue, {"w has 11 rows", "multiple of E = 3"});
  expect_dx_refused(ErrorKind::kInvalidValue, {"w has 11 rows", "multiple of E = 3"});
}

TEST_F(Validate, ContractionLengthsMustAgree) {
  w = TensorView::stack(w_data.data(), kType, 3, 5, 4);
  y = TensorView::matrix(y_data.data(), kType, 12, 5);
  expect_forward_refused(ErrorKind::kInvalidValue, {"w is fp32[3, 5, 4]", "[E, N, K] = [3, 5, 5]"});
  expect_dx_refused(ErrorKind::kInvalidValue, {"dy is fp32[12, 4]", "[M, N] = [12, 5]"});
}

TEST_F(Validate, OutputShapesAreChecked) {
  y.shape[0] = 11;
  expect_forward_refused(ErrorKind::kInvalidValue, {"y is fp32[11, 4]", "[M, N] = [12, 4]"});
  dx_out.shape[0] = 11;
  expect_dx_refused(ErrorKind::kInvalidValue, {"dx is fp32[11, 5]", "[M, K] = [12, 5]"});
  dw_out.shape = {3, 5, 4};
  expect_dw_refused(ErrorKind::kInvalidValue, {"dw is fp32[3, 5, 4]", "[E, N, K] = [3, 4, 5]"});
  dw_out = TensorView::matrix(out_data.data(), kType, 11, 5);
  expect_dw_refused(ErrorKind::kInvalidValue, {"dw is fp32[11, 5]", "[E * N, K] = [12, 5]"});
}

TEST_F(Validate, XHasTokenRowsExactlyWithPermuteX) {
  options.permute_x = true;
  expect_forward_refused(ErrorKind::kInvalidValue,
                         {"x has 12 rows", "with permute_x", "T = M / topk = 12 / 2"});
  expect_dw_refused(ErrorKind::kInvalidValue,
                    {"x has 12 rows", "with permute_x", "T = M / topk = 12 / 2"});
  options.permute_x = false;
  x = x_tokens;
  expect_dw_refused(ErrorKind::kInvalidValue, {"x has 6 rows", "without permute_x", "M = 12"});
}

TEST_F(Validate, IndicesHaveOneEntryPerRow) {
  options.permute_y = true;
  routing.gather_indices.shape[0] = 11;
  expect_forward_refused(ErrorKind::kInvalidValue, {"gather_indices is int32[11]", "[M] = [12]"});
}

TEST_F(Validate, WeightsHaveOneEntryPerRowInEitherShape) {
  options.permute_y = options.fuse_mul = true;
  routing.topk_weights = TensorView::matrix(weights.data(), DType::kFloat32, 6, 2);
  EXPECT_TRUE(forward().problem.multiply);
  routing.topk_weights = TensorView::matrix(weights.data(), DType::kFloat32, 2, 6);
  expect_forward_refused(ErrorKind::kInvalidValue,
                         {"topk_weights is fp32[2, 6]", "[T, topk] = [6, 2]"});
  routing.topk_weights = TensorView::vector(weights.data(), DType::kFloat32, 6);
  expect_forward_refused(ErrorKind::kInvalidValue, {"topk_weights is fp32[6]", "[M] = [12]"});
  routing.topk_weights = TensorView::matrix(weights.data(), DType::kFloat32, 6, 2, 3);
  expect_forward_refused(ErrorKind::kInvalidValue, {"topk_weights has row_stride 3", "dense"});
}

TEST_F(Validate, TwoDimensionalWeightsNeedWholeTokens) {
  options.permute_y = options.fuse_mul = true;
  routing.topk = 5;
  routing.topk_weights = TensorView::matrix(weights.data(), DType::kFloat32, 2, 5);
  expect_forward_refused(ErrorKind::kInvalidValue, {"topk_weights", "M = 12", "topk = 5"});
}

TEST_F(Validate, ZeroColumnsAreRefused) {
  x = TensorView::matrix(x_data.data(), kType, 12, 0);
  w = TensorView::stack(w_data.data(), kType, 3, 4, 0);
  expect_forward_refused(ErrorKind::kInvalidValue, {"K is 0", "at least 1"});
  dy = TensorView::matrix(dy_data.data(), kType, 12, 0);
  w = TensorView::stack(w_data.data(), kType, 3, 0, 5);
  expect_dx_refused(ErrorKind::kInvalidValue, {"N is 0", "at least 1"});
}

// Overlap

TEST_F(Validate, OutputOverAnInputIsRefused) {
  y.data = x_data.data() + 59;  // the last element of x
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps x in memory", "separate"});
  y.data = w_data.data();
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps w"});
  dw_out.data = dy_data.data();
  expect_dw_refused(ErrorKind::kInvalidValue, {"dw overlaps dy"});
  y.data = sizes.data();
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps m_sizes"});
  options.permute_y = options.fuse_mul = true;
  y.data = indices.data();
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps gather_indices"});
  y.data = weights.data();
  expect_forward_refused(ErrorKind::kInvalidValue, {"y overlaps topk_weights"});
}

TEST_F(Validate, OutputRightBehindAnInputIsAccepted) {
  std::vector<float> buffer(12 * 5 + 12 * 4);
  x.data = buffer.data();
  y.data = buffer.data() + 12 * 5;
  EXPECT_NO_THROW(forward());
}

TEST_F(Validate, ColumnRangesOfOneBufferAreAcceptedWhenTheyAreDisjoint) {
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

// Manual configs

TEST_F(Validate, TmaLoadOfAGatheredOperandIsRefused) {
  options.config.emplace();
  options.config->tma_load_rows = true;
  EXPECT_NO_THROW(forward());
  EXPECT_NO_THROW(dx());
  EXPECT_NO_THROW(dw());
  options.permute_y = true;
  EXPECT_NO_THROW(forward()) << "X is in expert order";
  EXPECT_NO_THROW(dw()) << "X is in expert order";
  expect_dx_refused(ErrorKind::kInvalidValue, {"tma_load_rows", "dX", "permute_y", "gathered"});
  options.permute_y = false;
  options.permute_x = true;
  EXPECT_NO_THROW(dx()) << "dY is in expert order";
  x = x_tokens;
  expect_forward_refused(ErrorKind::kInvalidValue,
                         {"tma_load_rows", "forward", "permute_x", "gathered"});
  expect_dw_refused(ErrorKind::kInvalidValue, {"tma_load_rows", "dW", "permute_x", "gathered"});
}

TEST_F(Validate, TmaLoadOfGatheredGradientsInDwIsRefused) {
  options.config.emplace();
  options.config->tma_load_weights = true;
  options.permute_y = true;
  EXPECT_NO_THROW(forward());
  EXPECT_NO_THROW(dx());
  expect_dw_refused(ErrorKind::kInvalidValue, {"tma_load_weights", "dW", "permute_y", "gathered"});
}

TEST_F(Validate, TmaStoreOfScatteredRowsIsRefused) {
  options.config.emplace();
  options.config->tma_store = true;
  EXPECT_NO_THROW(forward());
  options.permute_y = true;
  expect_forward_refused(ErrorKind::kInvalidValue, {"tma_store", "forward", "permute_y"});
  EXPECT_NO_THROW(dx());
  EXPECT_NO_THROW(dw());
  options.permute_y = false;
  options.permute_x = true;
  expect_dx_refused(ErrorKind::kInvalidValue, {"tma_store", "dX", "permute_x"});
}

TEST_F(Validate, TmaSwitchedOffIsAlwaysAccepted) {
  options.config.emplace();
  options.config->tma_load_rows = options.config->tma_load_weights = options.config->tma_store =
      false;
  options.permute_y = true;
  EXPECT_NO_THROW(forward());
  EXPECT_NO_THROW(dx());
  EXPECT_NO_THROW(dw());
}

TEST_F(Validate, NegativeTileExtentsAreRefused) {
  options.config.emplace();
  options.config->block_rows = -64;
  expect_forward_refused(ErrorKind::kInvalidValue, {"block_rows is -64", "at least 0"});
  options.config.emplace();
  options.config->stages = -1;
  expect_forward_refused(ErrorKind::kInvalidValue, {"stages is -1", "at least 0"});
}

TEST_F(Validate, DescribesBiasAndActivation) {
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

TEST_F(Validate, RefusesWrongBiases) {
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

TEST_F(Validate, RefusesActivationsThatHaveNoPlace) {
  options.activation = Activation{};
  expect_forward_refused(ErrorKind::kInvalidValue, {"y", "[12, 4]", "activated columns"});
  expect_dx_refused(ErrorKind::kInvalidValue, {"the product", "5", "even"});
  expect_dw_refused(ErrorKind::kInvalidValue, {"activation", "dW"});
  options.permute_y = true;
  expect_forward_refused(ErrorKind::kInvalidValue, {"activation", "permute_y", "expert order"});
  options.fuse_mul = true;
  expect_forward_refused(ErrorKind::kInvalidValue, {"activation", "fuse_mul"});
  options = {};
  options.activation = Activation{.limit = -1.0f};
  y = TensorView::matrix(y_data.data(), kType, 12, 2);
  expect_forward_refused(ErrorKind::kInvalidValue, {"limit", "-1"});
}

}  // namespace
}  // namespace moegemm
