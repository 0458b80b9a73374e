#include "cuda/device/schedule/weight_tiles.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>

namespace moegemm::cuda {
namespace {

TEST(WeightTiling, CoverEveryTileOfEveryExpertOnce) {
  for (const bool b_fastest : {false, true}) {
    const WeightTiling tiling = {3, 5, b_fastest};
    std::set<std::tuple<int, int, int>> seen;
    for (int number = 0; number < 4 * tiling.tiles_per_expert(); ++number) {
      const WeightTile tile = decode_weight_tile(number, tiling, 128, 64);
      EXPECT_FALSE(tile.is_end());
      EXPECT_LT(tile.expert, 4);
      EXPECT_LT(tile.a_col, 3 * 128);
      EXPECT_LT(tile.b_col, 5 * 64);
      EXPECT_TRUE(seen.emplace(tile.expert, tile.a_col, tile.b_col).second);
    }
    EXPECT_EQ(seen.size(), 60u);
  }
}

TEST(WeightTiling, NeighboursDifferAlongTheFastestSide) {
  const WeightTile along_a = decode_weight_tile(1, {4, 6, false}, 256, 192);
  EXPECT_EQ(along_a.a_col, 256);
  EXPECT_EQ(along_a.b_col, 0);
  const WeightTile along_b = decode_weight_tile(1, {4, 6, true}, 256, 192);
  EXPECT_EQ(along_b.a_col, 0);
  EXPECT_EQ(along_b.b_col, 192);
}

}  // namespace
}  // namespace moegemm::cuda
