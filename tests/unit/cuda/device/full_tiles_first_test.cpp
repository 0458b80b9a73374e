#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

#include "cuda/device/schedule/tile_split.h"

namespace moegemm::cuda {
namespace {

constexpr int kMaxRows = 128, kGranule = 32, kFeatureTile = 256, kFeatureTiles = 5;

/// All tiles of experts with `sizes` rows, in the kernels' order with full tiles first.
std::vector<Tile> full_first(const std::vector<int>& sizes) {
  std::vector<Tile> tiles;
  for (const bool full : {true, false}) {
    int segment = 0;
    for (int expert = 0; expert < static_cast<int>(sizes.size()); ++expert) {
      const int rows = sizes[expert];
      const int count = tiles_in_part(full, rows, kMaxRows, kGranule) * kFeatureTiles;
      for (int local = 0; local < count; ++local) {
        tiles.push_back(decode_tile_in_part(full, local, expert, segment, rows, kMaxRows, kGranule,
                                            kFeatureTile));
      }
      segment += rows;
    }
  }
  return tiles;
}

TEST(FullTilesFirst, VisitEveryRowAndFeatureOnce) {
  for (int rows = 0; rows <= 5 * kMaxRows + 3; ++rows) {
    const std::vector<int> sizes = {rows, 0, 70};
    std::set<std::pair<int, int>> seen;  // row, feature
    for (const Tile& tile : full_first(sizes)) {
      ASSERT_GT(tile.rows, 0);
      ASSERT_GE(tile.row, tile.expert == 0 ? 0 : rows);
      ASSERT_LE(tile.row + tile.rows, tile.expert == 0 ? rows : rows + 70);
      for (int row = tile.row; row < tile.row + tile.rows; ++row) {
        ASSERT_TRUE(seen.emplace(row, tile.feature).second) << rows << " rows, row " << row;
      }
    }
    ASSERT_EQ(static_cast<int>(seen.size()), (rows + 70) * kFeatureTiles);
  }
}

TEST(FullTilesFirst, AreAsManyAsExpertByExpert) {
  for (int rows = 0; rows <= 5 * kMaxRows + 3; ++rows) {
    EXPECT_EQ(tiles_in_part(true, rows, kMaxRows, kGranule) +
                  tiles_in_part(false, rows, kMaxRows, kGranule),
              row_tiles(rows, kMaxRows));
  }
}

TEST(FullTilesFirst, ComeBeforeAllOthers) {
  for (int rows = 1; rows <= 5 * kMaxRows + 3; ++rows) {
    bool full = true;
    for (const Tile& tile : full_first({rows, 5 * kMaxRows - rows % kMaxRows, 256, 33})) {
      const bool is_full = ceil_div(tile.rows, kGranule) * kGranule == kMaxRows;
      ASSERT_FALSE(is_full && !full) << rows << " rows";
      full = is_full;
    }
  }
}

TEST(FullTilesFirst, ShareWeightsWithNeighbours) {
  const auto tiles = full_first({300, 256});  // heights 4, 3, 3 and 4, 4
  EXPECT_EQ(tiles[4].feature, 4 * kFeatureTile);
  EXPECT_EQ(tiles[5].expert, 1);
  EXPECT_EQ(tiles[6].expert, 1);
  EXPECT_EQ(tiles[5].feature, tiles[6].feature);
  EXPECT_EQ(tiles[15].expert, 0);
  EXPECT_EQ(tiles[15].feature, tiles[16].feature);
  EXPECT_EQ(tiles[17].feature, kFeatureTile);
}

TEST(FullTilesFirst, AreForRowsThatL2DoesNotKeep) {
  constexpr std::int64_t kL2 = 50 << 20;
  // Mixtral-8x7B, 8192 tokens: fwd1, dx1, fwd2, dx2.
  EXPECT_FALSE(full_tiles_first(2048, 4096, 2, kL2));
  EXPECT_TRUE(full_tiles_first(2048, 28672, 2, kL2));
  EXPECT_TRUE(full_tiles_first(2048, 14336, 2, kL2));
  EXPECT_FALSE(full_tiles_first(2048, 4096, 2, kL2));
}

}  // namespace
}  // namespace moegemm::cuda
