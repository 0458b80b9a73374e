#pragma once

#include "cuda/device/host_device.h"

/// How an expert's rows become tiles. A tile holds at most `max_rows` rows; a segment is cut into
/// ceil(m / max_rows) tiles of nearly equal size, in steps of `granule` rows, so that an uneven
/// segment wastes less than one granule per tile instead of most of a tile.
namespace moegemm::cuda {

MOEGEMM_HOST_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct RowRange {
  int first = 0;  ///< first row, relative to the segment
  int count = 0;  ///< rows of the segment in this tile
  bool operator==(const RowRange&) const = default;
};

/// Tiles of a segment of `rows` rows; none for an empty one.
MOEGEMM_HOST_DEVICE int row_tiles(int rows, int max_rows) { return ceil_div(rows, max_rows); }

/// Rows of tile `index` of `tiles`: the first tiles take one granule more where they do not divide
/// evenly. `max_rows` is a multiple of `granule`.
MOEGEMM_HOST_DEVICE RowRange row_range(int rows, int index, int tiles, int granule) {
  const int units = ceil_div(rows, granule);
  const int each = units / tiles;
  const int larger = units - each * tiles;  // tiles with one unit more
  const int first = (index * each + (index < larger ? index : larger)) * granule;
  const int end = first + (each + (index < larger ? 1 : 0)) * granule;
  return {first, (end < rows ? end : rows) - first};
}

/// Sizes as the contract wants them: negative counts as 0, and nothing reaches past `total_rows`.
MOEGEMM_HOST_DEVICE int clip_size(long long size, int total_rows) {
  return size <= 0 ? 0 : (size >= total_rows ? total_rows : static_cast<int>(size));
}

/// a + b, at most `limit`; both are at most `limit` < 2^31. Associative, so a parallel scan with it
/// clips every prefix at the buffer's end.
MOEGEMM_HOST_DEVICE int add_saturating(int a, int b, int limit) {
  const unsigned sum = static_cast<unsigned>(a) + static_cast<unsigned>(b);
  return sum > static_cast<unsigned>(limit) ? limit : static_cast<int>(sum);
}

/// One output tile, as the scheduler hands it to the warps.
struct Tile {
  int expert = 0;
  int row = 0;      ///< first row, in expert order over the whole buffer
  int rows = 0;     ///< rows to store; 0 marks the end of the work
  int feature = 0;  ///< first output column
};

/// Tile number `local` of an expert whose segment starts at `segment` and has `rows` rows. Row
/// tiles go first: neighbouring blocks then share a weight panel.
MOEGEMM_HOST_DEVICE Tile decode_tile(int local, int expert, int segment, int rows, int max_rows,
                                     int granule, int feature_tile) {
  const int tiles = row_tiles(rows, max_rows);
  const int feature_block = local / tiles;
  const RowRange range = row_range(rows, local - feature_block * tiles, tiles, granule);
  return {expert, segment + range.first, range.count, feature_block * feature_tile};
}

}  // namespace moegemm::cuda
