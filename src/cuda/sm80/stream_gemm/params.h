#pragma once

#include "cuda/sm80/row_gemm/params.h"
#include "cuda/sm80/stream_gemm/traits.h"

namespace moegemm::cuda::sm80 {

struct StreamGemmParams : RowGemmParams {
  int row_slots;     ///< rows that a block has room for
  int tile_rows;     ///< of a tile, at most: row_slots or less
  int granule;       ///< rows of an expert are cut into tiles in steps of this
  int shared_pitch;  ///< bytes between rows in shared memory
  int column_tiles;  ///< of N
  FastDivisor column_divisor;
  int scale_columns;  ///< scales of a row of W
  int first_scales;   ///< with the stage at this depth of a tile its first scales are loaded
};

}  // namespace moegemm::cuda::sm80
