#include "cuda/sm80/row/row_tiles.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace moegemm::cuda::sm80 {
namespace {

constexpr int kMaxRows = 128, kGranule = 32, kFeatureTile = 256, kFeatureTiles = 5;
constexpr int kSegment = 1000;

Tile tall_first(int local, int rows) {
  return decode_tile_tall_first(local, 7, kSegment, rows, kMaxRows, kGranule, kFeatureTile,
                                kFeatureTiles);
}

TEST(TallFirst, VisitsEveryRowAndFeatureOnce) {
  for (int rows = 1; rows <= 5 * kMaxRows + 3; ++rows) {
    std::set<std::pair<int, int>> seen;  // row, feature
    for (int local = 0; local < row_tiles(rows, kMaxRows) * kFeatureTiles; ++local) {
      const Tile tile = tall_first(local, rows);
      ASSERT_EQ(tile.expert, 7);
      ASSERT_GT(tile.rows, 0);
      ASSERT_GE(tile.row, kSegment);
      ASSERT_LE(tile.row + tile.rows, kSegment + rows);
      for (int row = tile.row; row < tile.row + tile.rows; ++row) {
        ASSERT_TRUE(seen.emplace(row, tile.feature).second) << rows << " rows, tile " << local;
      }
    }
    ASSERT_EQ(static_cast<int>(seen.size()), rows * kFeatureTiles);
  }
}

TEST(TallFirst, HeightsNeverGrow) {
  for (int rows = 1; rows <= 5 * kMaxRows + 3; ++rows) {
    int before = kMaxRows;
    for (int local = 0; local < row_tiles(rows, kMaxRows) * kFeatureTiles; ++local) {
      const int height = ceil_div(tall_first(local, rows).rows, kGranule);
      ASSERT_LE(height, before) << rows << " rows, tile " << local;
      before = height;
    }
  }
}

TEST(TallFirst, NeighboursShareWeights) {
  const int rows = 300;  // 10 granules: heights 4, 3 and 3
  EXPECT_EQ(tall_first(0, rows).feature, 0);
  EXPECT_EQ(tall_first(4, rows).feature, 4 * kFeatureTile);
  EXPECT_EQ(tall_first(5, rows).feature, 0);
  EXPECT_EQ(tall_first(6, rows).feature, 0);
  EXPECT_EQ(tall_first(7, rows).feature, kFeatureTile);
}

TEST(TallFirst, IsForRowsThatL2DoesNotKeep) {
  constexpr std::int64_t kL2 = 50 << 20;
  // Mixtral-8x7B, 8192 tokens: fwd1, dx1, fwd2, dx2.
  EXPECT_FALSE(tall_tiles_first(2048, 4096, 2, kL2));
  EXPECT_TRUE(tall_tiles_first(2048, 28672, 2, kL2));
  EXPECT_TRUE(tall_tiles_first(2048, 14336, 2, kL2));
  EXPECT_FALSE(tall_tiles_first(2048, 4096, 2, kL2));
}

}  // namespace
}  // namespace moegemm::cuda::sm80
