#pragma once

#include <cstdint>

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

/// Tiles come expert by expert, or, with full tiles first, in two parts. The first has the tiles of
/// all experts that are max_rows high, the second the others; in each the experts follow each
/// other, and row tiles go before features.
///
/// Blocks that run at the same time then take the same time, and stay together along the
/// contraction: they share panels of rows and weights through L2. Short tiles come last, which also
/// lets the blocks end together.
///
/// This is how many tiles of a segment are in a part, for each block of features.
MOEGEMM_HOST_DEVICE int tiles_in_part(bool full, int rows, int max_rows, int granule) {
  const int tiles = row_tiles(rows, max_rows);
  const int spare = ceil_div(rows, granule) - (max_rows / granule - 1) * tiles;
  const int full_tiles = spare > 0 ? spare : 0;
  return full ? full_tiles : tiles - full_tiles;
}

/// Tile number `local` of an expert in a part: see decode_tile.
MOEGEMM_HOST_DEVICE Tile decode_tile_in_part(bool full, int local, int expert, int segment,
                                             int rows, int max_rows, int granule,
                                             int feature_tile) {
  const int tiles = row_tiles(rows, max_rows);
  const int count = tiles_in_part(full, rows, max_rows, granule);
  const int feature_block = local / count;
  const int index = local - feature_block * count + (full ? 0 : tiles - count);
  const RowRange range = row_range(rows, index, tiles, granule);
  return {expert, segment + range.first, range.count, feature_block * feature_tile};
}

/// Where the rows of an expert are more than L2 keeps, blocks must be at about the same depth to
/// share panels: on an H200, Mixtral-8x7B dx1 read 13 GB expert by expert and reads 6 to 7 with
/// full tiles first, of which 3 are needed. Elsewhere whole panels stay, and the second part
/// would only read the weights again.
inline bool full_tiles_first(std::int64_t rows_per_expert, std::int64_t depth,
                             std::int64_t element_bytes, std::int64_t l2_bytes) {
  return rows_per_expert * depth * element_bytes > l2_bytes / 2;
}

}  // namespace moegemm::cuda
