#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/device/fast_divide.h"
#include "cuda/device/segments.cuh"
#include "cuda/device/tile_counter.h"
#include "cuda/sm90/row_gemm/config.h"
#include "moegemm/epilogue.h"

namespace moegemm::cuda::sm90 {

/// What a row GEMM is launched with. Forward: features = N, depth = K, rows of X. dX: features =
/// K, depth = N, rows of dY.
struct RowGemmParams {
  /// Forward: {K, N, E}, box {64, features of the tile, 1}. dX: {64, N, K / 64, E}, box {64, 64,
  /// slabs of the tile, 1}, so that a panel of 64-column slabs is one copy; {K, N, E}, box {64, 64,
  /// 1} where K is not a multiple of 64. Activated tiles: {K, N / 2, 2, E}, box {64, half of the
  /// tile's features, 2, 1}, or {K, N, 1, E} without a gate.
  CUtensorMap weights_map;
  CUtensorMap rows_maps[kMaxBoxes];  ///< {depth, M}, box {64, box_rows(i)}; for rows in order

  const std::byte* rows;   ///< gathered rows: base address
  std::int64_t row_bytes;  ///< and pitch
  void* out;
  std::int64_t out_stride;  ///< elements

  IndexArray m_sizes;
  IndexArray gather_indices;
  const void* topk_weights;
  TileCounter* counter;

  int experts;
  int named_words;  ///< of shared memory, for UnnamedRows
  int total_rows;
  int flat_rows;  ///< indices are below it; rows of a scattered output
  int features;
  int depth;
  FastDivisor divisor;  ///< a gathered flat index over this is the row to read

  bool weights_pass_through;  ///< plain forward tiles: L2 need not keep the weights
  bool weights_in_slabs;      ///< dX: one copy per slab, K is not a multiple of 64
  bool scatter;               ///< result row r goes to flat row gather_indices[r]
  bool multiply;              ///< and is scaled by topk_weights of that flat row
  bool weights_are_fp32;
  bool out_is_fp32;
  bool rounds;        ///< the opposite, for the common epilogue: one flag would stay in a register
  bool vector_store;  ///< 16-byte stores of 16-bit results are aligned

  const void* bias;  ///< [experts, features] in the dtype of the inputs; null: none
  std::int64_t bias_stride;

  // Activated tiles only.
  Activation activation;
  int columns;    ///< of the output: features, or half as many behind a gate
  int bias_step;  ///< column c has its gate's bias at c * bias_step,
  int first_up;   ///< and its up's at first_up + c * bias_step
};

}  // namespace moegemm::cuda::sm90
