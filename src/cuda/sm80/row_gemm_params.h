#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device/fast_divide.h"
#include "cuda/device/segments.cuh"
#include "cuda/device/tile_counter.h"

namespace moegemm::cuda::sm80 {

/// Where results go: rows of `cols` elements.
struct OutputView {
  void* data;
  std::int64_t stride;  ///< elements
  int cols;
  bool is_fp32;     ///< else the input type
  bool accumulate;  ///< add to what is there; fp32 only
};

/// What a row kernel is launched with. Forward: features = N, depth = K, rows of X. dX: features =
/// K, depth = N, rows of dY.
struct RowGemmParams {
  const std::byte* rows;
  unsigned row_bytes;  ///< pitch
  const std::byte* weights;
  std::int64_t weight_bytes;  ///< pitch of a row of W
  std::int64_t expert_bytes;
  OutputView out;

  IndexArray m_sizes;
  IndexArray gather_indices;
  const void* topk_weights;
  TileCounter* counter;

  int experts;
  int total_rows;
  int depth;
  FastDivisor divisor;  ///< a gathered flat index over this is the row to read

  bool gather;    ///< rows are read through gather_indices
  bool scatter;   ///< result row r goes to flat row gather_indices[r]
  bool multiply;  ///< and is scaled by topk_weights of that flat row
  bool weights_are_fp32;
};

}  // namespace moegemm::cuda::sm80
