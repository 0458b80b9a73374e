#pragma once

#include <cstdint>

#include "cuda/device/tile_split.h"
#include "cuda/sm80/tile/traits.h"

/// In which order the row GEMMs' tiles come: expert by expert (tile_split.h), or, with full tiles
/// first, in two parts. The first has the tiles of all experts that are max_rows high, the second
/// the others; in each the experts follow each other, and row tiles go before features.
///
/// Blocks that run at the same time then take the same time, and stay together along the
/// contraction: they share panels of rows and weights through L2. Short tiles come last, which also
/// lets the blocks end together.
namespace moegemm::cuda::sm80 {

/// How many tiles of a segment are in a part, for each block of features.
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

constexpr int kTargetSlots = 8;   ///< tiles whose results' places are known: stages + 2 are needed
constexpr int kNamedWords = 256;  ///< of UnnamedRows

/// Byte offsets into dynamic shared memory.
template <typename Shape>
struct RowGemmLayout : PipelineLayout<Shape> {
  static constexpr int kTargets = PipelineLayout<Shape>::kEnd;  ///< RowTarget [slots][rows]
  static constexpr int kNamedRows =
      kTargets + (Shape::kLoadWarps > 0 ? kTargetSlots * Shape::kRows * 8 : 0);
  static constexpr int kStarts = kNamedRows + kNamedWords * 4;  ///< SegmentStart [E + 1]
  static constexpr std::int64_t total(std::int64_t experts) { return kStarts + (experts + 1) * 8; }
};

using RowGemm = Gemm;

/// Defined in kernel.cuh, instantiated in the translation unit of the line.
template <RowGemm Kernel, DType D>
KernelFunctions row_gemm_functions();

}  // namespace moegemm::cuda::sm80
