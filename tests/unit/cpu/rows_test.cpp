#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "cpu/element_type.h"
#include "moegemm/moegemm.h"

namespace moegemm {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

template <typename T>
constexpr DType kIndexType = sizeof(T) == 4 ? DType::kInt32 : DType::kInt64;

template <typename T>
struct Routed {
  std::vector<T> sizes;
  std::vector<T> order;
  std::vector<T> inverse;
};

template <typename T, typename Id>
Routed<T> route_ids(const std::vector<Id>& ids, std::int64_t topk, std::int64_t experts,
                    std::int64_t row_stride = 0) {
  const std::int64_t stride = row_stride == 0 ? topk : row_stride;
  const std::int64_t tokens = (static_cast<std::int64_t>(ids.size()) + stride - topk) / stride;
  const std::int64_t rows = tokens * topk;
  Routed<T> result{std::vector<T>(experts, -7), std::vector<T>(rows, -7), std::vector<T>(rows, -7)};
  route(TensorView::matrix(ids.data(), kIndexType<Id>, tokens, topk, stride), experts,
        TensorView::vector(result.sizes.data(), kIndexType<T>, experts),
        TensorView::vector(result.order.data(), kIndexType<T>, rows),
        TensorView::vector(result.inverse.data(), kIndexType<T>, rows));
  return result;
}

TEST(Route, SortsRowsByExpertAndKeepsTheirOrder) {
  const auto routed = route_ids<std::int32_t>(std::vector<std::int32_t>{2, 0, 1, 2, 0, 2}, 2, 4);
  EXPECT_EQ(routed.sizes, (std::vector<std::int32_t>{2, 1, 3, 0}));
  EXPECT_EQ(routed.order, (std::vector<std::int32_t>{1, 4, 2, 0, 3, 5}));
  EXPECT_EQ(routed.inverse, (std::vector<std::int32_t>{3, 0, 2, 4, 1, 5}));
}

TEST(Route, IdsOutOfRangeFallToTheEnd) {
  const auto routed = route_ids<std::int64_t>(
      std::vector<std::int64_t>{-1, 0, 3, 1, std::numeric_limits<std::int64_t>::max(), 0}, 1, 3);
  EXPECT_EQ(routed.sizes, (std::vector<std::int64_t>{2, 1, 0}));
  EXPECT_EQ(routed.order, (std::vector<std::int64_t>{1, 5, 3, 0, 2, 4}));
}

TEST(Route, ReadsStridedRowsOfIds) {
  // Columns 2 and 3 belong to somebody else.
  const auto routed = route_ids<std::int32_t>(std::vector<std::int64_t>{1, 0, 9, 9, 0, 1, 9, 9}, 2,
                                              2, /*row_stride=*/4);
  EXPECT_EQ(routed.sizes, (std::vector<std::int32_t>{2, 2}));
  EXPECT_EQ(routed.order, (std::vector<std::int32_t>{1, 2, 0, 3}));
}

TEST(Route, NoTokensGiveEmptySegments) {
  std::vector<std::int32_t> sizes = {5, 5};
  route(TensorView::matrix(nullptr, DType::kInt32, 0, 2), 2,
        TensorView::vector(sizes.data(), DType::kInt32, 2),
        TensorView::vector(nullptr, DType::kInt32, 0));
  EXPECT_EQ(sizes, (std::vector<std::int32_t>{0, 0}));
}

TEST(Route, AgreesWithAStableSortOnRandomIds) {
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    const std::int64_t experts = 1 + random() % 40;
    const std::int64_t topk = 1 + random() % 10;
    std::vector<std::int32_t> ids(topk * (random() % 300));
    for (auto& id : ids) id = static_cast<std::int32_t>(random() % (experts + 2)) - 1;
    const auto routed = route_ids<std::int64_t>(ids, topk, experts);
    const auto key = [&](std::int64_t row) {
      return ids[row] < 0 || ids[row] >= experts ? experts : ids[row];
    };
    std::vector<std::int64_t> expected(ids.size());
    std::iota(expected.begin(), expected.end(), 0);
    std::stable_sort(expected.begin(), expected.end(),
                     [&](std::int64_t a, std::int64_t b) { return key(a) < key(b); });
    ASSERT_EQ(routed.order, expected);
    for (std::size_t r = 0; r < expected.size(); ++r) {
      ASSERT_EQ(routed.inverse[expected[r]], static_cast<std::int64_t>(r));
    }
    for (std::int64_t e = 0; e < experts; ++e) {
      ASSERT_EQ(routed.sizes[e], std::count(ids.begin(), ids.end(), e));
    }
  }
}

TEST(Combine, SumsTheWeightedRowsOfEachToken) {
  const std::vector<float> rows = {1, 2, 3, 4, 5, 6, 7, 8};
  const std::vector<float> weights = {1, 10, 100, 1000};
  std::vector<float> out(4, kNaN);
  combine(TensorView::matrix(rows.data(), DType::kFloat32, 4, 2),
          TensorView::matrix(weights.data(), DType::kFloat32, 2, 2), 2,
          TensorView::matrix(out.data(), DType::kFloat32, 2, 2));
  EXPECT_EQ(out, (std::vector<float>{31, 42, 7500, 8600}));
}

TEST(Combine, WithoutWeightsIsAPlainSum) {
  const std::vector<float> rows = {1, 2, 3, 4, 5, 6};
  std::vector<float> out(2, kNaN);
  combine(TensorView::matrix(rows.data(), DType::kFloat32, 3, 2), {}, 3,
          TensorView::matrix(out.data(), DType::kFloat32, 1, 2));
  EXPECT_EQ(out, (std::vector<float>{9, 12}));
}

TEST(Combine, AddsHalfPrecisionRowsInFloatAndRoundsOnce) {
  // 256 + 1 + 1 in bf16 steps would stay 256; summed in fp32 it is 258, which bf16 holds.
  const std::vector<BFloat16> rows = {to_bfloat16(256), to_bfloat16(1), to_bfloat16(1)};
  std::vector<BFloat16> out(1);
  combine(TensorView::matrix(rows.data(), DType::kBFloat16, 3, 1), {}, 3,
          TensorView::matrix(out.data(), DType::kBFloat16, 1, 1));
  EXPECT_EQ(to_float(out[0]), 258);
}

TEST(Combine, LargeInputsAreSplitOverWorkersWithoutChangingBits) {
  constexpr std::int64_t kTokens = 300;
  constexpr std::int64_t kCols = 701;
  std::vector<float> rows(kTokens * 2 * kCols);
  std::mt19937 random(3);
  for (float& value : rows) value = std::uniform_real_distribution<float>(-1, 1)(random);
  std::vector<float> out(kTokens * kCols, kNaN);
  combine(TensorView::matrix(rows.data(), DType::kFloat32, kTokens * 2, kCols), {}, 2,
          TensorView::matrix(out.data(), DType::kFloat32, kTokens, kCols));
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t c = 0; c < kCols; ++c) {
      ASSERT_EQ(out[t * kCols + c], rows[2 * t * kCols + c] + rows[(2 * t + 1) * kCols + c]);
    }
  }
}

/// M = 4, K = 3, positions to flat rows 2, 0, 3, 1; the last position lies past the segments.
class ScaleRows : public ::testing::Test {
 protected:
  void run(const TensorView& scaled_out, const TensorView& scaled_x_out = {}) {
    RoutingView routing;
    routing.m_sizes = TensorView::vector(sizes.data(), DType::kInt32, 2);
    routing.gather_indices = TensorView::vector(order.data(), DType::kInt32, 4);
    routing.router_weights = TensorView::vector(weights.data(), DType::kFloat32, 4);
    routing.topk = 2;
    scale_rows(view(product), view(x), routing, scaled_out,
               TensorView::vector(dot.data(), DType::kFloat32, 4), scaled_x_out);
  }
  static TensorView view(const std::vector<float>& data) {
    return TensorView::matrix(data.data(), DType::kFloat32, 4, 3);
  }

  std::vector<std::int32_t> sizes = {1, 2};
  std::vector<std::int32_t> order = {2, 0, 3, 1};
  std::vector<float> weights = {10, 20, 30, 40};
  std::vector<float> product = {1, 2, 3, 4, 5, 6, 7, 8, 9, kNaN, kNaN, kNaN};
  std::vector<float> x = {1, 1, 1, 1, 0, 0, 0, 1, 2, kNaN, kNaN, kNaN};
  std::vector<float> scaled = std::vector<float>(12, kNaN);
  std::vector<float> scaled_x = std::vector<float>(12, kNaN);
  std::vector<float> dot = std::vector<float>(4, kNaN);
};

TEST_F(ScaleRows, ScalesByTheWeightOfTheFlatRowAndStoresDotsThere) {
  run(view(scaled), view(scaled_x));
  EXPECT_EQ(scaled, (std::vector<float>{30, 60, 90, 40, 50, 60, 280, 320, 360, 0, 0, 0}));
  EXPECT_EQ(scaled_x, (std::vector<float>{30, 30, 30, 10, 0, 0, 0, 40, 80, 0, 0, 0}));
  EXPECT_EQ(dot, (std::vector<float>{4, 0, 6, 26})) << "nobody names flat row 1";
}

TEST_F(ScaleRows, WorksInPlace) {
  run(view(product));
  EXPECT_EQ(product, (std::vector<float>{30, 60, 90, 40, 50, 60, 280, 320, 360, 0, 0, 0}));
  EXPECT_EQ(dot, (std::vector<float>{4, 0, 6, 26}));
}

TEST_F(ScaleRows, IndexOutOfRangeReadsAsAZeroRow) {
  order = {2, -1, 4, 1};
  run(view(scaled));
  EXPECT_EQ(scaled, (std::vector<float>{30, 60, 90, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(dot, (std::vector<float>{0, 0, 6, 0}));
}

TEST(ScaleRowsDot, LongRowsAreSummedToFloatAccuracy) {
  constexpr std::int64_t kCols = 1003;  // not a multiple of any lane count
  std::vector<float> product(kCols);
  std::vector<float> x(kCols);
  std::mt19937 random(11);
  double expected = 0;
  for (std::int64_t c = 0; c < kCols; ++c) {
    product[c] = std::uniform_real_distribution<float>(-1, 1)(random);
    x[c] = std::uniform_real_distribution<float>(-1, 1)(random);
    expected += static_cast<double>(product[c]) * x[c];
  }
  const std::int32_t size = 1;
  const std::int32_t index = 0;
  const float weight = 1;
  float dot = kNaN;
  std::vector<float> scaled(kCols, kNaN);
  RoutingView routing;
  routing.m_sizes = TensorView::vector(&size, DType::kInt32, 1);
  routing.gather_indices = TensorView::vector(&index, DType::kInt32, 1);
  routing.router_weights = TensorView::vector(&weight, DType::kFloat32, 1);
  scale_rows(TensorView::matrix(product.data(), DType::kFloat32, 1, kCols),
             TensorView::matrix(x.data(), DType::kFloat32, 1, kCols), routing,
             TensorView::matrix(scaled.data(), DType::kFloat32, 1, kCols),
             TensorView::vector(&dot, DType::kFloat32, 1));
  // Each of ~70 additions per lane chain rounds a partial sum below sqrt(1003).
  EXPECT_NEAR(dot, expected, 70 * 32 * 0x1p-24);
}

}  // namespace
}  // namespace moegemm
