#include "cuda/sm90/weight_gemm/traits.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "cuda/device/fast_divide.h"
#include "cuda/device/schedule/size_class.h"

namespace moegemm::cuda::sm90 {
namespace {

constexpr int kATile = 256;
constexpr int kBTile = 192;
constexpr int kStageRows = 32;

TEST(WeightStages, HoldEveryRowOnceAndOnlyRowsOfTheSegment) {
  for (const int first_row : {0, 1, 15, 16, 17, 30, 31, 32, 1000}) {
    for (int rows = 0; rows <= 5 * kStageRows + 1; ++rows) {
      const WeightTile tile = {.row = first_row, .rows = rows};
      const int stages = stages_of(rows, kStageRows);
      EXPECT_GE(stages, kLeadStages);
      int next = 0;
      for (int index = 0; index < stages; ++index) {
        const StageRows stage = rows_of_stage(tile, index, kStageRows);
        if (stage.begin >= stage.end) continue;
        EXPECT_EQ(stage.begin, next);
        EXPECT_GE(stage.begin, stage.first);
        EXPECT_LE(stage.end, stage.first + kStageRows);
        next = stage.end;
      }
      EXPECT_EQ(next, rows);
    }
  }
}

TEST(WeightStages, GroupRowsAsAProductOfTheSegmentAloneDoes) {
  for (const int first_row : {0, 1, 15, 16, 17, 30, 31, 32, 1000}) {
    for (int rows = 0; rows <= 5 * kStageRows + 1; ++rows) {
      const WeightTile tile = {.row = first_row, .rows = rows};
      int last_group = -1;
      for (int index = 0; index < stages_of(rows, kStageRows); ++index) {
        const StageRows stage = rows_of_stage(tile, index, kStageRows);
        for (int place = 0; place < kStageRows; place += kGroupRows) {
          std::set<int> groups;
          for (int row = stage.first + place; row < stage.first + place + kGroupRows; ++row) {
            if (row >= stage.begin && row < stage.end) groups.insert(row / kGroupRows);
          }
          ASSERT_LE(groups.size(), 1u) << rows << " rows from " << first_row;
          if (groups.empty()) continue;
          EXPECT_EQ(*groups.begin(), last_group + 1);
          last_group = *groups.begin();
        }
      }
    }
  }
}

/// What a map {stage rows, M}, both with the stride of a row, yields for a box: the operand's row
/// at each place, or -1 for zeros.
std::vector<int> read_box(const StageBox& box, int m) {
  std::vector<int> places;
  for (int i = 0; i < kStageRows; ++i) {
    const int stage_row = box.stage_row + i;
    const bool inside = stage_row >= 0 && stage_row < kStageRows && box.row >= 0 && box.row < m;
    places.push_back(inside ? stage_row + box.row : -1);
  }
  return places;
}

TEST(WeightStages, AreReadAsBoxesWithoutARowOfANeighbour) {
  for (const int first_row : {0, 1, 5, 15, 16, 17, 30, 31, 32, 100}) {
    for (int rows = 0; rows <= 5 * kStageRows + 1; ++rows) {
      const WeightTile tile = {.row = first_row, .rows = rows};
      for (int index = 0; index < stages_of(rows, kStageRows); ++index) {
        const StageRows stage = rows_of_stage(tile, index, kStageRows);
        const auto places = read_box(box_of_stage(tile, stage, kStageRows), first_row + rows + 3);
        for (int i = 0; i < kStageRows; ++i) {
          const int row = stage.first + i;
          const bool held = row >= stage.begin && row < stage.end;
          ASSERT_EQ(places[i], held ? first_row + row : -1)
              << rows << " rows from " << first_row << ", stage " << index << ", place " << i;
        }
      }
    }
  }
}

TEST(WeightStages, WhatIsNotMultipliedIsAGroupWithoutRowsAtTheEnd) {
  for (const int first_row : {0, 1, 15, 16, 17, 30, 31, 32, 1000}) {
    for (int rows = 0; rows <= 5 * kStageRows + 1; ++rows) {
      const WeightTile tile = {.row = first_row, .rows = rows};
      const int stages = stages_of(rows, kStageRows);
      const int whole = whole_stages_of(rows, kStageRows);
      const StageRows last = rows_of_stage(tile, stages - 1, kStageRows);
      const bool is_short = last.end <= last.first + kGroupRows;
      EXPECT_EQ(whole, stages > kLeadStages && is_short ? stages - 1 : stages)
          << rows << " rows from " << first_row;
    }
  }
}

TEST(WeightStages, OnlyWhatSmallSegmentsLackIsPadded) {
  EXPECT_EQ(stages_of(0, kStageRows), kLeadStages);
  EXPECT_EQ(stages_of(64, kStageRows), 2);
  EXPECT_EQ(stages_of(65, kStageRows), 3);
}

TEST(WeightTiles, TheGatheredOperandTakesTheWideSide) {
  EXPECT_TRUE(a_side_is_x(true, false, 1536, 2048, kATile, kBTile));
  EXPECT_FALSE(a_side_is_x(false, true, 1536, 2048, kATile, kBTile));
}

TEST(WeightTiles, WithoutGatherTheSideThatPadsLessIsChosen) {
  EXPECT_TRUE(a_side_is_x(false, false, 192, 256, kATile, kBTile));
  EXPECT_FALSE(a_side_is_x(false, false, 256, 192, kATile, kBTile));
}

TEST(SizeClass, GrowsWithTheSizeInStepsOfLessThanHalf) {
  EXPECT_EQ(size_class(0), 0);
  EXPECT_EQ(size_class(1), 0);
  int first_of_class = 1;
  for (int size = 2; size < 1 << 17; ++size) {
    const int step = size_class(size) - size_class(size - 1);
    ASSERT_GE(step, 0);
    ASSERT_LT(size_class(size), kSizeClasses);
    if (step > 0) first_of_class = size;
    if (size < 1 << 16) {
      ASSERT_LE(2 * size, 3 * first_of_class) << size;
    }
  }
  EXPECT_EQ(size_class(std::numeric_limits<int>::max()), kSizeClasses - 1);
}

TEST(FastDivisor, EqualsDivisionForEveryDivisorAndTheHardestNumbers) {
  std::mt19937 random(1);
  constexpr std::uint32_t kLimit = std::uint32_t{1} << 31;
  for (std::uint32_t divisor = 1; divisor < 3000; ++divisor) {
    const FastDivisor fast = make_fast_divisor(divisor);
    const std::uint32_t top = (kLimit - 1) / divisor * divisor;
    for (const std::uint32_t n : {0u, 1u, divisor - 1, divisor, top, top - 1, kLimit - 1,
                                  static_cast<std::uint32_t>(random() % kLimit)}) {
      ASSERT_EQ(fast.divide(n), n / divisor) << n << " / " << divisor;
    }
  }
  for (const std::uint32_t divisor : {kLimit - 1, kLimit, (std::uint32_t{1} << 30) + 1}) {
    const FastDivisor fast = make_fast_divisor(divisor);
    for (const std::uint32_t n : {0u, divisor - 1, kLimit - 1}) {
      ASSERT_EQ(fast.divide(n), n / divisor) << n << " / " << divisor;
    }
  }
}

}  // namespace
}  // namespace moegemm::cuda::sm90
