#include "layer/oracle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>

#include "testing/device/memory.h"

namespace moegemm::cli {
namespace {

TEST(Comparison, OneRoundingOfTheOutputTypePasses) {
  Comparison comparison(DType::kBFloat16, std::nullopt);
  comparison.add(0, 0, 1.0 + 0x1p-8, 1.0, 1.0, 16);
  EXPECT_TRUE(comparison.result().passed()) << comparison.result().fault;
}

TEST(Comparison, TwoRoundingsOfOneElementFailEvenWhenTheNormIsFine) {
  Comparison comparison(DType::kBFloat16, std::nullopt);
  for (int i = 0; i < 1000; ++i) comparison.add(0, i, 1.0, 1.0, 1.0, 16);
  comparison.add(7, 3, 1.0 + 0x1p-7, 1.0, 1.0, 16);
  const CheckResult result = comparison.result();
  EXPECT_LT(result.error, result.tolerance);
  EXPECT_FALSE(result.passed());
  EXPECT_NE(result.fault.find("[7, 3]"), std::string::npos) << result.fault;
}

TEST(Comparison, UnwrittenElementFails) {
  Comparison comparison(DType::kFloat32, std::nullopt);
  comparison.add(0, 0, std::numeric_limits<double>::quiet_NaN(), 1.0, 1.0, 1);
  EXPECT_FALSE(comparison.result().passed());
}

TEST(Comparison, ToleranceOfZeroRefusesAnyError) {
  Comparison comparison(DType::kBFloat16, 0.0);
  comparison.add(0, 0, 1.0 + 0x1p-9, 1.0, 1.0, 16);
  EXPECT_FALSE(comparison.result().passed());
}

TEST(Comparison, NothingToCompareHasNoError) {
  const CheckResult result = Comparison(DType::kFloat32, std::nullopt).result();
  EXPECT_EQ(result.error, 0);
  EXPECT_TRUE(result.passed());
}

TEST(Spread, IncludesBothEndsAndNeverRepeats) {
  EXPECT_EQ(spread(10, 3), (std::vector<std::int64_t>{0, 4, 9}));
  EXPECT_EQ(spread(3, 10), (std::vector<std::int64_t>{0, 1, 2}));
  EXPECT_EQ(spread(1, 4), (std::vector<std::int64_t>{0}));
  EXPECT_EQ(spread(0, 4), (std::vector<std::int64_t>{}));
}

class CheckProducts : public ::testing::Test {
 protected:
  CheckResult check() {
    // out[0] = 2 * [1 2] * [[1, 0], [0, 1], [1, 1]]^T
    const auto right = [](std::int64_t col, std::int64_t l) {
      constexpr double kRight[3][2] = {{1, 0}, {0, 1}, {1, 1}};
      return kRight[col][l];
    };
    const std::vector<OracleRow> rows = {{0, {1, 2}, right, 2.0}};
    return check_products(*memory_, TensorView::matrix(out_, DType::kFloat32, 1, 3), rows,
                          std::nullopt);
  }

  std::unique_ptr<testing::Memory> memory_ = testing::open_memory({});
  float out_[3] = {2, 4, 6};
};

TEST_F(CheckProducts, AcceptsTheProduct) {
  EXPECT_TRUE(check().passed()) << check().fault;
  EXPECT_EQ(check().elements, 3);
}

TEST_F(CheckProducts, NamesTheWrongElement) {
  out_[2] = 6.001F;
  EXPECT_NE(check().fault.find("[0, 2]"), std::string::npos) << check().fault;
}

}  // namespace
}  // namespace moegemm::cli
