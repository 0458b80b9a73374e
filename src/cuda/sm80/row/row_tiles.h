#pragma once

#include <cstdint>

#include "cuda/device/tile_split.h"

/// In which order the row kernels' tiles come.
namespace moegemm::cuda::sm80 {

/// decode_tile with the tiles that are a granule taller first, with all their features. Blocks that
/// run at the same time then take the same time, and stay together along the contraction.
MOEGEMM_HOST_DEVICE Tile decode_tile_tall_first(int local, int expert, int segment, int rows,
                                                int max_rows, int granule, int feature_tile,
                                                int feature_tiles) {
  const int tiles = row_tiles(rows, max_rows);
  const int taller = ceil_div(rows, granule) % tiles;
  const bool tall = local < taller * feature_tiles;
  const int count = tall ? taller : tiles - taller;
  const int number = tall ? local : local - taller * feature_tiles;
  const int feature_block = number / count;
  const int index = number - feature_block * count + (tall ? 0 : taller);
  const RowRange range = row_range(rows, index, tiles, granule);
  return {expert, segment + range.first, range.count, feature_block * feature_tile};
}

/// Blocks share panels of rows and weights through L2. Where the rows of an expert are more than it
/// keeps, the blocks must be at about the same depth for that: on an H200, Mixtral-8x7B dx1 read 13
/// GB, of which 3 are needed. Elsewhere whole panels stay, and all features of the taller tiles
/// first would only read the weights twice.
inline bool tall_tiles_first(std::int64_t rows_per_expert, std::int64_t depth,
                             std::int64_t element_bytes, std::int64_t l2_bytes) {
  return rows_per_expert * depth * element_bytes > l2_bytes / 2;
}

}  // namespace moegemm::cuda::sm80
