#pragma once

#include <cuda.h>

#include "cuda/device/fast_divide.h"
#include "cuda/device/segments.cuh"
#include "cuda/device/tile_counter.h"
#include "cuda/sm90/weight_gemm/tiles.h"

namespace moegemm::cuda::sm90 {

enum class WeightOutput : int {
  kInputType,     ///< rounded to the type of X and dY
  kFloat32,       ///< fp32, overwritten
  kAddToFloat32,  ///< fp32, dW +=
};

/// What the dW kernel is launched with.
struct WeightGemmParams {
  /// Inputs: 3-D maps {columns, stage rows, M} whose dimensions 1 and 2 have the same stride, box
  /// {64, stage rows, 1}. A stage from row r whose last z rows are missing is read at
  /// (column, z, r - z), one whose first z rows are missing at (column, -z, r + z): coordinates
  /// outside dimension 1 come out zero.
  /// Where slabs of 64 columns divide the columns, 4-D maps {64, stage rows, slabs, M}, so that all
  /// slabs of a stage are one box: each box costs the copy engine tens of cycles.
  CUtensorMap a_map;  ///< not used when A is gathered
  CUtensorMap b_map;
  bool a_in_one_box;
  bool b_in_one_box;
  CUtensorMap out_map;  ///< {K, N, E}, box {128 bytes, 64, 1}

  IndexArray m_sizes;  ///< [E]
  /// [M]; data is null where no operand is permuted. A row whose index is out of range is absent:
  /// zeros in both operands, since 0 times a NaN opposite it would not be 0.
  IndexArray gather_indices;
  const unsigned char* gathered;  ///< operand A if it is gathered, else null
  unsigned gathered_row_chunks;   ///< its row pitch in 16 bytes
  FastDivisor gather_divisor;     ///< flat index -> row of the gathered operand
  /// The operand that is not permuted, for stages with absent rows; the other has zeros there.
  const unsigned char* opposite;
  std::int64_t opposite_row_bytes;
  bool opposite_is_a;

  WeightTiling tiling;
  int experts;
  int total_rows;  ///< M
  int flat_rows;   ///< indices are below it
  WeightOutput output;
  TileCounter* counter;  ///< null: static stride
};

}  // namespace moegemm::cuda::sm90
