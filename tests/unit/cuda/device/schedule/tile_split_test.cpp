#include "cuda/device/schedule/tile_split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

namespace moegemm::cuda {
namespace {

struct Shape {
  int max_rows;
  int granule;
};

class TileSplit : public testing::TestWithParam<Shape> {};

TEST_P(TileSplit, CoversEveryRowOfASegmentExactlyOnce) {
  const auto [max_rows, granule] = GetParam();
  for (int rows = 0; rows <= 3 * max_rows + 5; ++rows) {
    const int tiles = row_tiles(rows, max_rows);
    int next = 0;
    for (int index = 0; index < tiles; ++index) {
      const RowRange range = row_range(rows, index, tiles, granule);
      ASSERT_EQ(range.first, next) << "rows " << rows << " tile " << index;
      ASSERT_GT(range.count, 0) << "rows " << rows << " tile " << index;
      ASSERT_LE(range.count, max_rows) << "rows " << rows << " tile " << index;
      next = range.first + range.count;
    }
    ASSERT_EQ(next, rows);
  }
}

TEST_P(TileSplit, TilesDifferByAtMostOneGranule) {
  const auto [max_rows, granule] = GetParam();
  for (int rows = 1; rows <= 4 * max_rows; ++rows) {
    const int tiles = row_tiles(rows, max_rows);
    int least = max_rows;
    int most = 0;
    for (int index = 0; index < tiles; ++index) {
      const int padded = ceil_div(row_range(rows, index, tiles, granule).count, granule) * granule;
      least = std::min(least, padded);
      most = std::max(most, padded);
    }
    ASSERT_LE(most - least, granule) << "rows " << rows;
  }
}

TEST_P(TileSplit, HugeSegmentsDoNotOverflow) {
  const auto [max_rows, granule] = GetParam();
  const int rows = (1 << 30) - 1;
  const int tiles = row_tiles(rows, max_rows);
  const RowRange last = row_range(rows, tiles - 1, tiles, granule);
  EXPECT_EQ(last.first + last.count, rows);
  EXPECT_GT(last.count, 0);
}

INSTANTIATE_TEST_SUITE_P(Shapes, TileSplit,
                         testing::Values(Shape{192, 16}, Shape{128, 16}, Shape{160, 16},
                                         Shape{64, 8}, Shape{256, 16}));

TEST(DecodeTile, VisitsEveryRowAndColumnOnce) {
  constexpr int kMaxRows = 64, kGranule = 8, kFeatureTile = 128;
  const std::vector<int> sizes = {0, 1, 63, 64, 65, 0, 200, 0};
  const int features = 300;
  const int feature_tiles = ceil_div(features, kFeatureTile);
  std::set<std::pair<int, int>> seen;  // row, feature tile
  int segment = 0;
  for (int expert = 0; expert < static_cast<int>(sizes.size()); ++expert) {
    const int tiles = row_tiles(sizes[expert], kMaxRows) * feature_tiles;
    for (int local = 0; local < tiles; ++local) {
      const Tile tile =
          decode_tile(local, expert, segment, sizes[expert], kMaxRows, kGranule, kFeatureTile);
      EXPECT_EQ(tile.expert, expert);
      EXPECT_GE(tile.row, segment);
      EXPECT_LE(tile.row + tile.rows, segment + sizes[expert]);
      for (int row = tile.row; row < tile.row + tile.rows; ++row) {
        EXPECT_TRUE(seen.emplace(row, tile.feature / kFeatureTile).second);
      }
    }
    segment += sizes[expert];
  }
  EXPECT_EQ(static_cast<int>(seen.size()), segment * feature_tiles);
}

TEST(ClipSize, NegativeCountsAsZeroAndNothingExceedsTheBuffer) {
  EXPECT_EQ(clip_size(-5, 10), 0);
  EXPECT_EQ(clip_size(0, 10), 0);
  EXPECT_EQ(clip_size(7, 10), 7);
  EXPECT_EQ(clip_size(11, 10), 10);
  EXPECT_EQ(clip_size(1LL << 40, 10), 10);
}

TEST(AddSaturating, StopsAtTheLimitWithoutOverflow) {
  constexpr int kLimit = 2147483647;
  EXPECT_EQ(add_saturating(3, 4, 10), 7);
  EXPECT_EQ(add_saturating(8, 4, 10), 10);
  EXPECT_EQ(add_saturating(kLimit, kLimit, kLimit), kLimit);
}

}  // namespace
}  // namespace moegemm::cuda
