#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "core/factor_tiles.h"
#include "moegemm/passes.h"
#include "unit/core/expect_refusal.h"

namespace moegemm::testing {
namespace {

StridedStack stack(float* data, std::array<std::int64_t, 3> shape,
                   std::array<std::int64_t, 3> strides) {
  return {data, DType::kFloat32, shape, strides, {}};
}

/// What PEFT has: [N, r, E] in memory, [E, N, r] to us.
TEST(FactorTiles, PeftsOwnLayoutIsTurnedAsOneMatrix) {
  float from[1], to[1];
  const FactorTiles tiles =
      factor_tiles({stack(from, {4, 6, 8}, {1, 32, 4}), stack(to, {4, 6, 8}, {48, 8, 1}), 2.0f});
  EXPECT_TRUE(tiles.turned);
  EXPECT_EQ(tiles.columns.extent(), 4);
  EXPECT_TRUE(tiles.columns.inner_is_expert);
  EXPECT_EQ(tiles.lines.extent(), 48);
  EXPECT_EQ(tiles.lines.inner, 8);
  EXPECT_EQ(tiles.lines.to_inner, 1);
}

TEST(FactorTiles, TheWayBackKeepsRowsTogether) {
  float from[1], to[1];
  const FactorTiles tiles =
      factor_tiles({stack(from, {4, 6, 8}, {48, 8, 1}), stack(to, {4, 6, 8}, {1, 32, 4}), 1.0f});
  EXPECT_TRUE(tiles.turned);
  EXPECT_EQ(tiles.columns.extent(), 48);
  EXPECT_EQ(tiles.lines.extent(), 4);
  EXPECT_TRUE(tiles.lines.inner_is_expert);
}

TEST(FactorTiles, TheSameLayoutIsNotTurned) {
  float from[1], to[1];
  const FactorTiles tiles =
      factor_tiles({stack(from, {4, 6, 8}, {48, 8, 1}), stack(to, {4, 6, 8}, {48, 8, 1}), 1.0f});
  EXPECT_FALSE(tiles.turned);
  EXPECT_EQ(tiles.columns.extent(), 8);
  EXPECT_EQ(tiles.lines.extent(), 24);
}

TEST(CopyFactors, RefusesWhatDoesNotFit) {
  std::vector<float> from(64), to(64);
  const StridedStack small = stack(to.data(), {2, 3, 4}, {12, 4, 1});
  const auto copy = [&](const StridedStack& source, const StridedStack& target) {
    const FactorCopy one = {source, target, 1.0f};
    copy_factors({&one, 1});
  };
  using enum ErrorKind;
  expect_refusal(kInvalidValue, {"to 0 has extent 4 in dimension 2", "at least 5 as from"}, [&] {
    copy(stack(from.data(), {2, 3, 5}, {15, 5, 1}), small);
  });
  expect_refusal(kInvalidValue, {"to 0 has extent 2 in dimension 0", "it must have 1 as from"},
                 [&] {
                   copy(stack(from.data(), {1, 3, 4}, {12, 4, 1}), small);
                 });
  expect_refusal(kInvalidValue, {"from 0 is fp32[2, 3, 4] on cpu with a null data pointer"}, [&] {
    copy(stack(nullptr, {2, 3, 4}, {12, 4, 1}), small);
  });
  expect_refusal(kInvalidValue, {"from 0 has stride -4 in dimension 1", "not be negative"}, [&] {
    copy(stack(from.data(), {2, 3, 4}, {12, -4, 1}), small);
  });
  StridedStack whole = stack(from.data(), {2, 3, 4}, {12, 4, 1});
  whole.dtype = DType::kInt32;
  expect_refusal(kInvalidType, {"from 0 has dtype int32", "bf16, fp16 and fp32"},
                 [&] { copy(whole, small); });
  whole.dtype = DType::kFloat32;
  whole.device = {DeviceType::kCuda, 1};
  expect_refusal(kInvalidType, {"from 0 is on cuda:1", "it must be on cpu, where to 0 is"},
                 [&] { copy(whole, small); });
}

TEST(CopyFactors, RefusesSizesOfOtherExperts) {
  std::vector<float> from(24), to(24);
  const std::vector<std::int32_t> sizes = {1, 2, 3};
  const FactorCopy one = {stack(from.data(), {2, 3, 4}, {12, 4, 1}),
                          stack(to.data(), {2, 3, 4}, {12, 4, 1}), 1.0f};
  expect_refusal(ErrorKind::kInvalidValue, {"m_sizes is int32[3]"}, [&] {
    copy_factors({&one, 1}, TensorView::vector(sizes.data(), DType::kInt32, 3));
  });
}

TEST(CopyFactors, RefusesSizesWithoutMemory) {
  std::vector<float> from(24), to(24);
  const FactorCopy one = {stack(from.data(), {2, 3, 4}, {12, 4, 1}),
                          stack(to.data(), {2, 3, 4}, {12, 4, 1}), 1.0f};
  expect_refusal(ErrorKind::kInvalidValue, {"m_sizes is int32[2]", "null data pointer"}, [&] {
    copy_factors({&one, 1}, TensorView::vector(nullptr, DType::kInt32, 2));
  });
}

/// Two copies in one buffer of [2, 3, 8] floats.
class CopiesInOneBuffer : public ::testing::Test {
 protected:
  void copy(const StridedStack& second_to, const TensorView& sizes = {}) {
    const FactorCopy both[] = {{stack(from.data(), {2, 3, 4}, {12, 4, 1}), left, 1.0f},
                               {stack(from.data(), {2, 3, 4}, {12, 4, 1}), second_to, 2.0f}};
    copy_factors(both, sizes);
  }
  StridedStack columns(std::int64_t first, std::int64_t count) {
    return stack(to.data() + first, {2, 3, count}, {24, 8, 1});
  }

  std::vector<float> from = std::vector<float>(24, 1.0f), to = std::vector<float>(48);
  const StridedStack left = columns(0, 4);
};

TEST_F(CopiesInOneBuffer, MayLieSideBySide) {
  copy(columns(4, 4));
  EXPECT_EQ(to[3], 1.0f);
  EXPECT_EQ(to[4], 2.0f);
}

TEST_F(CopiesInOneBuffer, OfOneColumnEachToo) {
  const StridedStack narrow = stack(from.data(), {2, 3, 1}, {3, 1, 1});
  const FactorCopy both[] = {{narrow, columns(0, 1), 1.0f}, {narrow, columns(1, 7), 1.0f}};
  copy_factors(both);
  EXPECT_EQ(to[1], 1.0f);
}

TEST_F(CopiesInOneBuffer, OfTurnedStacksToo) {
  const FactorCopy both[] = {
      {stack(from.data(), {2, 3, 4}, {12, 4, 1}), stack(to.data(), {2, 3, 4}, {1, 16, 2}), 1.0f},
      {stack(from.data(), {2, 3, 4}, {12, 4, 1}), stack(to.data() + 8, {2, 3, 4}, {1, 16, 2}),
       2.0f}};
  copy_factors(both);
  EXPECT_EQ(to[7], 1.0f);
  EXPECT_EQ(to[8], 2.0f);
}

TEST_F(CopiesInOneBuffer, ShareNoElement) {
  using enum ErrorKind;
  expect_refusal(kInvalidValue, {"to 1 overlaps to 0"}, [&] { copy(columns(3, 4)); });
  expect_refusal(kInvalidValue, {"to 1 overlaps from 0"}, [&] {
    copy(stack(from.data(), {2, 3, 4}, {12, 4, 1}));
  });
  expect_refusal(kInvalidValue, {"to 0 overlaps m_sizes"},
                 [&] { copy(columns(4, 4), TensorView::vector(to.data() + 8, DType::kInt32, 2)); });
}

TEST(FactorRows, RefusesRowsInTheMemoryOfAnOperand) {
  std::vector<float> x(2 * 8), memory(2 * 3 * 8);
  const auto refused = [&](const char* name, const float* factor, const RoutingView& routing) {
    expect_refusal(ErrorKind::kInvalidValue, {"rows overlaps ", name}, [&] {
      factor_rows(TensorView::matrix(x.data(), DType::kFloat32, 2, 8),
                  stack(const_cast<float*>(factor), {2, 3, 8}, {24, 8, 1}), routing,
                  TensorView::matrix(memory.data(), DType::kFloat32, 2, padded_rank(3)));
    });
  };
  const std::vector<float> factor(2 * 3 * 8);
  const std::vector<std::int32_t> ones = {1, 1};
  const TensorView sizes = TensorView::vector(ones.data(), DType::kInt32, 2);
  const TensorView inside = TensorView::vector(memory.data(), DType::kInt32, 2);
  refused("factor", memory.data(), {sizes, {}, {}, 1});
  refused("m_sizes", factor.data(), {inside, {}, {}, 1});
  RoutingView placed = {sizes, {}, {}, 1};
  placed.starts = inside;
  refused("starts", factor.data(), placed);
}

TEST(FactorRows, IsRefusedOnTheCpu) {
  std::vector<float> x(2 * 8), factor(2 * 3 * 8), rows(2 * 8);
  const std::vector<std::int32_t> sizes = {1, 1};
  const RoutingView routing = {TensorView::vector(sizes.data(), DType::kInt32, 2), {}, {}, 1};
  const auto product = [&](std::int64_t depth) {
    factor_rows(TensorView::matrix(x.data(), DType::kFloat32, 2, depth),
                stack(factor.data(), {2, 3, 8}, {24, 8, 1}), routing,
                TensorView::matrix(rows.data(), DType::kFloat32, 2, padded_rank(3)));
  };
  expect_refusal(ErrorKind::kNotImplemented, {"x is on cpu", "not on a GPU"}, [&] { product(8); });
  expect_refusal(ErrorKind::kInvalidValue, {"factor is fp32[2, 3, 8]", "[E, r, K] = [2, 3, 7]"},
                 [&] { product(7); });
}

TEST(CopyFactors, NothingToCopyIsNothing) {
  copy_factors({});
  const FactorCopy empty = {stack(nullptr, {0, 3, 4}, {12, 4, 1}),
                            stack(nullptr, {0, 3, 4}, {12, 4, 1}), 1.0f};
  copy_factors({&empty, 1});
}

}  // namespace
}  // namespace moegemm::testing
