#pragma once

#include <cstdint>

#include "cuda/device/fast_divide.h"
#include "cuda/device/schedule/tile_counter.h"
#include "cuda/device/segments.cuh"

namespace moegemm::cuda::sm80 {

/// What every kernel is told about rows, experts and tokens.
struct RoutingParams : SegmentParams {
  IndexArray gather_indices;
  const void* router_weights;
  TileCounter* counter;

  int flat_rows;        ///< indices are below it
  FastDivisor divisor;  ///< a gathered flat index over this is the row to read

  bool multiply;  ///< by router_weights of the flat row: results of row GEMMs, dY of dW
  bool weights_are_fp32;

  /// The row to read for a flat index; negative for none.
  __device__ __forceinline__ int source_row(int flat) const {
    return flat < 0 ? -1 : static_cast<int>(divisor.divide(static_cast<unsigned>(flat)));
  }
  template <typename Element>
  __device__ __forceinline__ float router_weight(int flat) const {
    return cuda::router_weight<Element>(router_weights, weights_are_fp32, flat);
  }
};

/// Where results go: rows of `cols` elements.
struct OutputView {
  void* data;
  std::int64_t stride;  ///< elements
  int cols;
  bool is_fp32;     ///< else the input type
  bool accumulate;  ///< add to what is there; fp32 only
};

}  // namespace moegemm::cuda::sm80
