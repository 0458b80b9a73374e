#pragma once

#include <cstdint>

#include "cuda/device/host_device.h"

/// How dW = dY^T X is cut into tiles. Every expert has the same ones: its dW is [N, K] whatever its
/// rows. "A" is the operand on the tensor cores' M side, "B" the one on their N side.
namespace moegemm::cuda {

struct WeightTiling {
  int a_tiles = 0;  ///< tiles along the columns of A
  int b_tiles = 0;
  bool b_fastest = true;  ///< consecutive tiles differ in their B columns

  MOEGEMM_HOST_DEVICE int tiles_per_expert() const { return a_tiles * b_tiles; }
};

/// One output tile, as the scheduler hands it to the other warps.
struct WeightTile {
  int expert = -1;  ///< negative: no more work
  int row = 0;      ///< first row of the expert's segment
  int rows = 0;     ///< of the segment
  int a_col = 0;    ///< first column of operand A
  int b_col = 0;

  MOEGEMM_HOST_DEVICE bool is_end() const { return expert < 0; }
};

/// Expert (by position in the order of work) and columns of tile `number`; the caller fills in the
/// rows.
MOEGEMM_HOST_DEVICE WeightTile decode_weight_tile(int number, const WeightTiling& tiling,
                                                  int a_tile, int b_tile) {
  const int expert = number / tiling.tiles_per_expert();
  const int local = number - expert * tiling.tiles_per_expert();
  const int fastest_tiles = tiling.b_fastest ? tiling.b_tiles : tiling.a_tiles;
  const int slow = local / fastest_tiles;
  const int fast = local - slow * fastest_tiles;
  return {expert, 0, 0, (tiling.b_fastest ? slow : fast) * a_tile,
          (tiling.b_fastest ? fast : slow) * b_tile};
}

/// Tiles next to each other run at the same time and share a panel of one operand, while all panels
/// of the other are read once per lap. Along K first, so that neighbours write neighbouring parts
/// of the same rows, unless a lap along K reads more of X than L2 keeps and one along N reads less.
inline bool k_tiles_first(std::int64_t rows_per_expert, std::int64_t n, std::int64_t k,
                          std::int64_t element_bytes, std::int64_t l2_bytes) {
  return k <= n || rows_per_expert * k * element_bytes <= l2_bytes / 2;
}

}  // namespace moegemm::cuda
