#pragma once

#include <cstdint>

#include "cuda/device/host_device.h"
#include "cuda/device/tile_split.h"

/// How the output of dW = dY^T X is cut into tiles, and the rows of a segment into load stages.
/// Every expert has the same tiles: its dW is [N, K] whatever its rows.
///
/// "A" is the operand on wgmma's M side, "B" the one on its N side. Either of X and dY can be A;
/// the store turns the tile as needed.
namespace moegemm::cuda::sm90 {

struct WeightTiling {
  int a_cols = 0;  ///< columns of operand A: K if A is X, else N
  int b_cols = 0;
  int a_tiles = 0;  ///< tiles along the columns of A
  int b_tiles = 0;
  bool a_is_x = true;
  bool a_fastest = true;  ///< consecutive tiles differ in their A columns

  MOEGEMM_HOST_DEVICE int tiles_per_expert() const { return a_tiles * b_tiles; }
};

/// One output tile, as the scheduler hands it to the other warps.
struct WeightTile {
  int expert = 0;  ///< negative: no more work
  int row = 0;     ///< first row of the expert's segment
  int rows = 0;    ///< of the segment
  int a_col = 0;   ///< first column of operand A
  int b_col = 0;
};

/// Expert and columns of tile `number`; the rows are left for the caller to fill in.
MOEGEMM_HOST_DEVICE WeightTile decode_weight_tile(int number, const WeightTiling& tiling,
                                                  int a_tile, int b_tile) {
  const int expert = number / tiling.tiles_per_expert();
  const int local = number - expert * tiling.tiles_per_expert();
  const int fastest_tiles = tiling.a_fastest ? tiling.a_tiles : tiling.b_tiles;
  const int slow = local / fastest_tiles;
  const int fast = local - slow * fastest_tiles;
  return {expert, 0, 0, (tiling.a_fastest ? fast : slow) * a_tile,
          (tiling.a_fastest ? slow : fast) * b_tile};
}

/// The last tile's second store hides behind this many stages of the next tile's first block. One
/// is 2 % slower on 8-stage tiles, three 3 %: they hold stages that loads could fill.
constexpr int kLeadStages = 2;

/// Stages a segment is loaded in. An empty segment takes some too: the zeros that they are filled
/// with make the zero dW, so no kernel role needs to know about empty experts.
MOEGEMM_HOST_DEVICE int stages_of(int rows, int stage_rows) {
  const int stages = ceil_div(rows, stage_rows);
  return stages < kLeadStages ? kLeadStages : stages;
}

/// The segment row that stage `index` of `stages` starts with. The last stage ends with the
/// segment, so what is missing to whole stages is missing at the front: there rows are negative,
/// and stand for zeros. That is where a tensor map can be made to fill in zeros.
MOEGEMM_HOST_DEVICE int stage_start(int rows, int index, int stages, int stage_rows) {
  return rows - (stages - index) * stage_rows;
}

/// Which operand takes the M side. The gathered one must: its copies cost producer instructions,
/// and they are cheapest per FLOP on the wide side. Otherwise the side that pads less.
inline bool a_side_is_x(bool gathers_x, bool gathers_dy, std::int64_t n, std::int64_t k, int a_tile,
                        int b_tile) {
  if (gathers_x || gathers_dy) return gathers_x;
  const auto padded = [](std::int64_t cols, std::int64_t tile) {
    return (cols + tile - 1) / tile * tile;
  };
  return padded(k, a_tile) * padded(n, b_tile) <= padded(n, a_tile) * padded(k, b_tile);
}

}  // namespace moegemm::cuda::sm90
