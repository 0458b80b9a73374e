#include <gtest/gtest.h>

#include <vector>

#include "core/validation/validate.h"
#include "moegemm/passes.h"
#include "unit/core/expect_refusal.h"

namespace moegemm {
namespace {

using testing::expect_refusal;

/// A valid call with an mxfp4 W: E = 2, N = 6, K = 64, M = 8. Tests break one thing.
class QuantisedCall : public ::testing::Test {
 protected:
  QuantisedCall() {
    routing.m_sizes = TensorView::vector(sizes.data(), DType::kInt32, 2);
    options.quantization = {WeightFormat::kMxfp4, ScaleType::kE8m0, 1, 32};
    options.w_scales = {scales.data(), ScaleType::kE8m0, 3, {2, 6, 2}, {}};
  }

  Call forward() const {
    return place(described(Op::kForward, x, w, y, routing, options), x, w, y, routing, options);
  }
  void refused(ErrorKind kind, std::initializer_list<const char*> parts) const {
    expect_refusal(kind, parts, [this] { forward(); });
  }
  void refused_value(std::initializer_list<const char*> parts) const {
    refused(ErrorKind::kInvalidValue, parts);
  }
  void make_fp8(std::int64_t block_n, std::int64_t block_k) {
    options.quantization = {WeightFormat::kFp8, ScaleType::kFloat32, block_n, block_k};
    const Quantization& q = options.quantization;
    options.w_scales = {
        scales.data(), ScaleType::kFloat32, 3, {2, q.scale_rows(6), q.scale_columns(6, 64)}, {}};
  }

  static constexpr DType kType = DType::kBFloat16;
  std::vector<std::uint16_t> x_data = std::vector<std::uint16_t>(8 * 64);
  std::vector<std::uint16_t> y_data = std::vector<std::uint16_t>(8 * 64);
  alignas(16) std::vector<std::uint8_t> w_data = std::vector<std::uint8_t>(2 * 6 * 64);
  std::vector<float> scales = std::vector<float>(64);
  std::vector<std::int32_t> sizes = {4, 4};
  TensorView x = TensorView::matrix(x_data.data(), kType, 8, 64);
  TensorView w = TensorView::stack(w_data.data(), kType, 2, 6, 64);
  TensorView y = TensorView::matrix(y_data.data(), kType, 8, 6);
  RoutingView routing;
  GemmOptions options;
};

TEST_F(QuantisedCall, IsDescribedWithItsFormatAndAlignment) {
  const Call call = forward();
  EXPECT_EQ(call.problem.quantization, options.quantization);
  EXPECT_EQ(call.operands.w, w_data.data());
  EXPECT_EQ(call.operands.w_scales, scales.data());
  EXPECT_EQ(call.operands.w_stride, 64);
  EXPECT_EQ(call.problem.packed_alignment, 16);
  EXPECT_EQ(call.problem.scales_alignment, 2);
  w.data = w_data.data() + 4;
  EXPECT_EQ(forward().problem.packed_alignment, 4);
}

TEST_F(QuantisedCall, IsNeverWrittenTo) {
  expect_refusal(ErrorKind::kInvalidValue,
                 {"w is quantised (mxfp4) for dW", "a quantised W is frozen"},
                 [this] { describe(Op::kDw, x, x, routing, options); });
  options.weight_layout = WeightLayout::kKn;
  refused_value({"w is quantised (mxfp4) as [E, K, N]", "formats run along K"});
}

TEST_F(QuantisedCall, NeedsWholeGroups) {
  x = TensorView::matrix(x_data.data(), kType, 8, 48);
  w = TensorView::stack(w_data.data(), kType, 2, 6, 48);
  refused_value({"w has K = 48", "mxfp4", "a multiple of the group of 32"});
}

TEST_F(QuantisedCall, NeedsScalesOfItsShape) {
  options.w_scales.shape = {2, 6, 3};
  refused_value({"w_scales is e8m0[2, 6, 3] on cpu", "[2, 6, 2]", "W of [2, 6, 64]"});
  options.w_scales = {};
  refused_value({"w_scales is not given", "mxfp4 needs it"});
  options.w_scales = {scales.data(), ScaleType::kE8m0, 3, {2, 6, 2}, {DeviceType::kCuda, 0}};
  refused(ErrorKind::kInvalidType, {"w_scales is on cuda:0", "must be on cpu"});
  options.w_scales = {scales.data(), ScaleType::kFloat32, 3, {2, 6, 2}, {}};
  refused(ErrorKind::kInvalidType, {"w_scales has dtype fp32", "the format says e8m0"});
}

TEST_F(QuantisedCall, NeedsAFormatForScales) {
  options.quantization = {};
  refused_value({"w_scales is e8m0[2, 6, 2]", "no format is given"});
}

TEST_F(QuantisedCall, TakesBlocksOfItsFormatOnly) {
  options.quantization.block_k = 64;
  refused_value({"the blocks of mxfp4 are 1 x 64", "1 x 32"});
  options.quantization = {WeightFormat::kMxfp4, ScaleType::kFloat32, 1, 32};
  refused(ErrorKind::kInvalidType, {"w_scales are fp32", "e8m0", "mxfp4"});
  options.quantization = {WeightFormat::kInt4, ScaleType::kFloat32, 1, 32};
  refused(ErrorKind::kInvalidType, {"w_scales are fp32", "bf16 and fp16", "int4"});
  options.quantization = {WeightFormat::kInt4, ScaleType::kBFloat16, 1, 48};
  refused_value({"the blocks of int4 are 1 x 48", "1 x 128"});
  options.quantization = {WeightFormat::kNf4, ScaleType::kFloat32, 1, 48};
  refused_value({"the blocks of nf4 are 1 x 48", "a power of two from 32 to 4096"});
  make_fp8(64, 64);
  options.quantization.block_n = 5;
  refused_value({"the blocks of fp8 are 5 x 64", "128 x 128, 1 x K and N x K"});
}

TEST_F(QuantisedCall, TakesScalesWithoutTheirOnes) {
  make_fp8(6, 64);  // one for each expert
  for (int rank = 1; rank <= 3; ++rank) {
    options.w_scales.rank = rank;
    EXPECT_NO_THROW(forward()) << rank;
  }
  make_fp8(1, 64);  // one for each row
  options.w_scales.rank = 2;
  EXPECT_NO_THROW(forward());
  options.w_scales.rank = 1;
  refused_value({"w_scales is fp32[2] on cpu", "[2, 6, 1]"});
}

TEST_F(QuantisedCall, HasDenseValuesApartFromTheOutput) {
  w.row_stride = 80;
  refused_value({"w has row_stride 80", "row_stride = K = 64"});
  w.row_stride = 64;
  // 2 * 6 * 32 bytes of packed values: what follows them may be the output.
  y.data = w_data.data() + 2 * 6 * 32;
  EXPECT_NO_THROW(forward());
  y.data = w_data.data() + 2 * 6 * 32 - 2;
  refused_value({"y overlaps w"});
  y.data = scales.data();
  refused_value({"y overlaps w_scales"});
}

TEST_F(QuantisedCall, ReadsScalesWhereTheyAreAligned) {
  make_fp8(1, 64);
  options.w_scales.data = reinterpret_cast<const char*>(scales.data()) + 2;
  refused_value({"w_scales begins at an address", "multiple of 4"});
  options.w_scales.data = nullptr;
  refused_value({"w_scales is fp32[2, 6, 1]", "null data pointer"});
}

TEST_F(QuantisedCall, DequantisesByTheSameRules) {
  std::vector<std::uint16_t> out_data(2 * 6 * 64);
  TensorView out = TensorView::stack(out_data.data(), kType, 2, 6, 64);
  EXPECT_NO_THROW(dequantise_weights(w, options.w_scales, options.quantization, out));
  expect_refusal(ErrorKind::kInvalidValue, {"quantization is plain"},
                 [&] { dequantise_weights(w, options.w_scales, {}, out); });
  out.row_stride = 72;
  expect_refusal(ErrorKind::kInvalidValue, {"out has row_stride 72", "dense: K = 64"},
                 [&] { dequantise_weights(w, options.w_scales, options.quantization, out); });
  out.shape[1] = 5;
  expect_refusal(ErrorKind::kInvalidValue, {"out is bf16[2, 5, 64]", "[2, 6, 64]"},
                 [&] { dequantise_weights(w, options.w_scales, options.quantization, out); });
}

}  // namespace
}  // namespace moegemm
