#pragma once

#include "cuda/device/fast_divide.h"
#include "cuda/device/segments.cuh"
#include "cuda/device/tile_counter.h"

namespace moegemm::cuda::sm80 {

/// What every kernel is told about rows, experts and tokens.
struct RoutingParams {
  IndexArray m_sizes;
  IndexArray gather_indices;
  const void* topk_weights;
  TileCounter* counter;

  int experts;
  int total_rows;
  int flat_rows;        ///< indices are below it
  FastDivisor divisor;  ///< a gathered flat index over this is the row to read

  bool multiply;  ///< by topk_weights of the flat row: results of row GEMMs, dY of dW
  bool weights_are_fp32;
};

}  // namespace moegemm::cuda::sm80
