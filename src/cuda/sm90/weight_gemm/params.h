#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/device/fast_divide.h"
#include "cuda/device/pipeline.cuh"
#include "cuda/device/schedule/size_class.h"
#include "cuda/device/schedule/tile_counter.h"
#include "cuda/device/segments.cuh"
#include "cuda/sm90/weight_gemm/schedule.cuh"
#include "cuda/sm90/weight_gemm/traits.h"

namespace moegemm::cuda::sm90 {

enum class WeightOutput : int {
  kInputType,     ///< rounded to the type of X and dY
  kFloat32,       ///< fp32, overwritten
  kAddToFloat32,  ///< fp32, dW +=
};

/// What the dW kernel is launched with.
struct WeightGemmParams : SegmentParams {
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
  bool a_is_x;  ///< else A is dY

  int a_cols;  ///< columns of operand A: K if A is X, else N
  int b_cols;
  WeightTiling tiling;
  int flat_rows;  ///< indices are below it
  WeightOutput output;
  TileCounter* counter;  ///< null: static stride

  MOEGEMM_HOST_DEVICE bool adds() const { return output == WeightOutput::kAddToFloat32; }
};

/// Dynamic shared memory.
template <typename Traits>
struct WeightGemmShared {
  alignas(1024) unsigned char a[Traits::kStages][Traits::kABytes];
  alignas(1024) unsigned char b[Traits::kStages][Traits::kBBytes];
  alignas(1024) unsigned char staging[kConsumers][Traits::kStagingBytes];
  alignas(16) unsigned row_chunks[kLoadWarps][kWarpSize];  ///< see gather_rows
  Ring<Traits::kStages> loads;
  Ring<kWeightTileSlots> tile_ring;
  typename Traits::Tile tiles[kWeightTileSlots];
  std::uint64_t old_full[kConsumers];  ///< see WeightStore
  int class_counts[kSizeClasses];
  int row_prefix[1];  ///< experts + 1 entries, then the order: the rest of dynamic shared memory
};

}  // namespace moegemm::cuda::sm90
