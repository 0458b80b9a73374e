#include "layer/random_tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "testing/device/memory.h"
#include "testing/numerics/floats.h"

namespace moegemm::cli {
namespace {

TEST(RoundTo, Fp16EveryFiniteValueIsItsOwnRounding) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const auto value = testing::decode(DType::kFloat16, &half, 0);
    if (!std::isfinite(value)) continue;
    std::uint16_t stored = 0;
    testing::encode(DType::kFloat16, &stored, 0, value);
    ASSERT_EQ(stored, half) << value;
  }
}

TEST(RoundTo, TiesGoToEven) {
  EXPECT_EQ(testing::round_to(DType::kBFloat16, 1.0F + 0x1p-8F), 1.0F);
  EXPECT_EQ(testing::round_to(DType::kBFloat16, 1.0F + 3 * 0x1p-8F), 1.0F + 0x1p-6F);
  EXPECT_EQ(testing::round_to(DType::kFloat16, 1.0F + 0x1p-11F), 1.0F);
  EXPECT_EQ(testing::round_to(DType::kFloat16, 1.0F + 3 * 0x1p-11F), 1.0F + 0x1p-9F);
}

TEST(RoundTo, Fp16EndsOfTheRange) {
  EXPECT_EQ(testing::round_to(DType::kFloat16, 65519.0F), 65504.0F);
  EXPECT_TRUE(std::isinf(testing::round_to(DType::kFloat16, 65520.0F)));
  EXPECT_EQ(testing::round_to(DType::kFloat16, 0x1p-25F), 0.0F);
  EXPECT_EQ(testing::round_to(DType::kFloat16, 0x1.8p-25F), 0x1p-24F);
  EXPECT_TRUE(std::isnan(testing::round_to(DType::kFloat16, NAN)));
}

class RandomTensorTypes : public ::testing::TestWithParam<DType> {};

TEST_P(RandomTensorTypes, FillWritesTheElementsThatAtNames) {
  const auto memory = testing::open_memory({});
  const RandomTensor tensor(5, GetParam(), 0.5F);
  std::vector<std::byte> bytes(static_cast<std::size_t>(1001 * size_bytes(GetParam())));
  tensor.fill(*memory, bytes.data(), 1001);
  for (std::int64_t i = 0; i < 1001; ++i) {
    ASSERT_EQ(testing::decode(GetParam(), bytes.data(), i), tensor.at(i)) << i;
    ASSERT_LE(std::fabs(tensor.at(i)), 0.5F);
  }
}

TEST_P(RandomTensorTypes, SeedsGiveDifferentTensorsOfMeanZero) {
  const RandomTensor one(1, GetParam(), 1.0F);
  const RandomTensor two(2, GetParam(), 1.0F);
  constexpr int kCount = 10000;
  double sum = 0;
  int equal = 0;
  for (int i = 0; i < kCount; ++i) {
    sum += one.at(i);
    equal += one.at(i) == two.at(i) ? 1 : 0;
  }
  EXPECT_LT(equal, kCount / 50);
  // The mean of 10000 uniform values has a standard deviation of 0.0058.
  EXPECT_LT(std::fabs(sum / kCount), 0.03);
}

INSTANTIATE_TEST_SUITE_P(DTypes, RandomTensorTypes,
                         ::testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16),
                         [](const auto& type) { return to_string(type.param); });

}  // namespace
}  // namespace moegemm::cli
