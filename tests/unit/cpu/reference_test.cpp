#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "moegemm/moegemm.h"

namespace moegemm {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TensorView matrix(const std::vector<float>& data, std::int64_t rows, std::int64_t cols) {
  return TensorView::matrix(data.data(), DType::kFloat32, rows, cols);
}

TensorView vector(const std::vector<std::int32_t>& data) {
  return TensorView::vector(data.data(), DType::kInt32, static_cast<std::int64_t>(data.size()));
}

TensorView vector(const std::vector<float>& data) {
  return TensorView::vector(data.data(), DType::kFloat32, static_cast<std::int64_t>(data.size()));
}

/// Two experts, N = K = 2, small enough to compute by hand:
///   W_0 = [1 2; 3 4]    W_1 = [-1 0; 0 10]
/// Outputs start as NaN, so that an element that is not written fails.
class ReferenceByHand : public ::testing::Test {
 protected:
  ReferenceByHand() { options.backend = BackendKind::kReference; }

  RoutingView routing() const {
    RoutingView view;
    view.m_sizes = vector(sizes);
    if (!indices.empty()) view.gather_indices = vector(indices);
    if (!weights.empty()) view.router_weights = vector(weights);
    view.topk = topk;
    return view;
  }
  std::vector<float> run_forward(const std::vector<float>& x, std::int64_t rows) const {
    std::vector<float> y(rows * 2, kNaN);
    forward(matrix(x, static_cast<std::int64_t>(x.size()) / 2, 2), w(), matrix(y, rows, 2),
            routing(), options);
    return y;
  }
  std::vector<float> run_dx(const std::vector<float>& dy) const {
    std::vector<float> dx(dy.size(), kNaN);
    const auto rows = static_cast<std::int64_t>(dy.size()) / 2;
    backward_dx(matrix(dy, rows, 2), w(), matrix(dx, rows, 2), routing(), options);
    return dx;
  }
  std::vector<float> run_dw(const std::vector<float>& dy, const std::vector<float>& x,
                            float initial = kNaN) const {
    std::vector<float> dw(8, initial);
    backward_dw(matrix(dy, static_cast<std::int64_t>(dy.size()) / 2, 2),
                matrix(x, static_cast<std::int64_t>(x.size()) / 2, 2),
                TensorView::stack(dw.data(), DType::kFloat32, 2, 2, 2), routing(), options);
    return dw;
  }
  TensorView w() const { return TensorView::stack(w_data.data(), DType::kFloat32, 2, 2, 2); }

  std::vector<float> w_data = {1, 2, 3, 4, -1, 0, 0, 10};
  std::vector<std::int32_t> sizes = {2, 1};
  std::vector<std::int32_t> indices;
  std::vector<float> weights;
  std::int64_t topk = 1;
  GemmOptions options;
};

TEST_F(ReferenceByHand, ForwardMultipliesEachSegmentByItsExpert) {
  EXPECT_EQ(run_forward({1, 1, 2, 0, 5, 7}, 3), (std::vector<float>{3, 7, 2, 6, -5, 70}));
}

TEST_F(ReferenceByHand, DxMultipliesByTheUntransposedWeights) {
  // [1 1] W_0 = [4 6], [2 0] W_0 = [2 4], [5 7] W_1 = [-5 70]
  EXPECT_EQ(run_dx({1, 1, 2, 0, 5, 7}), (std::vector<float>{4, 6, 2, 4, -5, 70}));
}

TEST_F(ReferenceByHand, DwSumsOuterProductsOverTheSegment) {
  // Expert 0: [1 0]^T [1 2] + [0 1]^T [3 4]; expert 1: [2 3]^T [5 6]
  EXPECT_EQ(run_dw({1, 0, 0, 1, 2, 3}, {1, 2, 3, 4, 5, 6}),
            (std::vector<float>{1, 2, 3, 4, 10, 12, 15, 18}));
}

TEST_F(ReferenceByHand, DwAccumulatesWhenAsked) {
  options.accumulate = true;
  EXPECT_EQ(run_dw({1, 0, 0, 1, 2, 3}, {1, 2, 3, 4, 5, 6}, 100),
            (std::vector<float>{101, 102, 103, 104, 110, 112, 115, 118}));
}

TEST_F(ReferenceByHand, EmptyExpertGetsZeroWeightGradient) {
  sizes = {0, 3};
  const auto dw = run_dw({1, 0, 0, 1, 2, 3}, {1, 2, 3, 4, 5, 6});
  EXPECT_EQ((std::vector<float>{dw.begin(), dw.begin() + 4}), (std::vector<float>{0, 0, 0, 0}));
}

TEST_F(ReferenceByHand, PermuteXReadsTheTokenOfEachRow) {
  // Two tokens, topk 2. Flat rows 0 and 3 go to expert 0, flat rows 1 and 2 to expert 1.
  topk = 2;
  sizes = {2, 2};
  indices = {0, 3, 1, 2};
  options.permute_x = true;
  // Tokens [1 1] and [2 0]: expert 0 sees both, then expert 1 sees both.
  EXPECT_EQ(run_forward({1, 1, 2, 0}, 4), (std::vector<float>{3, 7, 2, 6, -1, 10, -2, 0}));
}

TEST_F(ReferenceByHand, PermuteXStoresDxInFlatOrder) {
  topk = 2;
  sizes = {2, 2};
  indices = {0, 3, 1, 2};
  options.permute_x = true;
  EXPECT_EQ(run_dx({1, 1, 2, 0, 5, 7, 1, 0}), (std::vector<float>{4, 6, -5, 70, -1, 0, 2, 4}));
}

TEST_F(ReferenceByHand, PermuteYStoresWeightedRowsInFlatOrder) {
  topk = 3;
  indices = {2, 0, 1};
  weights = {10, 100, 1000};
  options.permute_y = options.multiply = true;
  // Positions 0, 1, 2 give [3 7], [2 6], [-5 70] and go to flat rows 2, 0, 1.
  EXPECT_EQ(run_forward({1, 1, 2, 0, 5, 7}, 3),
            (std::vector<float>{20, 60, -500, 7000, 3000, 7000}));
}

TEST_F(ReferenceByHand, RowsPastTheSegmentsAreZero) {
  sizes = {1, 0};
  EXPECT_EQ(run_forward({1, 1, kNaN, kNaN, kNaN, kNaN}, 3), (std::vector<float>{3, 7, 0, 0, 0, 0}));
  EXPECT_EQ(run_dx({1, 1, kNaN, kNaN, kNaN, kNaN}), (std::vector<float>{4, 6, 0, 0, 0, 0}));
  EXPECT_EQ(run_dw({1, 0, kNaN, kNaN, kNaN, kNaN}, {1, 2, kNaN, kNaN, kNaN, kNaN}),
            (std::vector<float>{1, 2, 0, 0, 0, 0, 0, 0}));
}

TEST_F(ReferenceByHand, NegativeSizesCountAsZeroAndSegmentsAreClipped) {
  sizes = {-5, std::numeric_limits<std::int32_t>::max()};
  EXPECT_EQ(run_forward({1, 1, 2, 0, 5, 7}, 3), (std::vector<float>{-1, 10, -2, 0, -5, 70}));
}

TEST_F(ReferenceByHand, IndexOutOfRangeReadsZerosAndIsNotStored) {
  indices = {0, 3, -1};
  topk = 1;
  options.permute_y = true;
  EXPECT_EQ(run_forward({1, 1, 2, 0, 5, 7}, 3), (std::vector<float>{3, 7, 0, 0, 0, 0}));
  EXPECT_EQ(run_dx({1, 1, 2, 0, 5, 7}), (std::vector<float>{4, 6, 0, 0, 0, 0}));
  EXPECT_EQ(run_dw({1, 0, 0, 1, 2, 3}, {1, 2, 3, 4, 5, 6}),
            (std::vector<float>{1, 2, 0, 0, 0, 0, 0, 0}));
}

TEST_F(ReferenceByHand, NaNStaysInItsSegment) {
  EXPECT_EQ(run_forward({1, 1, 2, 0, kNaN, kNaN}, 2 + 1)[0], 3);
  const auto dw = run_dw({1, 0, 0, 1, kNaN, kNaN}, {1, 2, 3, 4, kNaN, kNaN});
  EXPECT_EQ((std::vector<float>{dw.begin(), dw.begin() + 4}), (std::vector<float>{1, 2, 3, 4}));
  EXPECT_TRUE(std::isnan(dw[4]));
}

TEST_F(ReferenceByHand, NoRowsAtAllStillZeroesTheWeightGradient) {
  sizes = {0, 0};
  EXPECT_EQ(run_dw({}, {}), std::vector<float>(8, 0));
  EXPECT_EQ(run_forward({}, 0), std::vector<float>{});
}

TEST_F(ReferenceByHand, OneTermOfManyMagnitudesIsNotLost) {
  // In fp32 the 1 would vanish next to 2^30: the oracle accumulates in double.
  const std::vector<float> x = {0x1p30f, 1, -0x1p30f};
  const std::vector<float> ones = {1, 1, 1};
  std::vector<float> y = {kNaN};
  RoutingView one;
  const std::vector<std::int32_t> one_row = {1};
  one.m_sizes = vector(one_row);
  forward(matrix(x, 1, 3), TensorView::stack(ones.data(), DType::kFloat32, 1, 1, 3),
          matrix(y, 1, 1), one, options);
  EXPECT_EQ(y[0], 1);
}

}  // namespace
}  // namespace moegemm
