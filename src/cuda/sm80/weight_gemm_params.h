#pragma once

#include "cuda/sm80/row_gemm_params.h"
#include "cuda/sm80/weight_tiles.h"

namespace moegemm::cuda::sm80 {

/// What a dW kernel is launched with. A is dY, B is X; at most one of them is gathered.
struct WeightGemmParams {
  const std::byte* dy;
  const std::byte* x;
  unsigned dy_bytes;  ///< pitch
  unsigned x_bytes;
  OutputView out;              ///< of expert 0: [N, K]
  std::int64_t expert_stride;  ///< elements between the outputs of two experts
  int n;

  IndexArray m_sizes;
  IndexArray gather_indices;
  const void* topk_weights;
  TileCounter* counter;
  WeightTiling tiling;

  int experts;
  int total_rows;
  FastDivisor divisor;  ///< a gathered flat index over this is the row to read

  bool gather_dy;
  bool gather_x;
  bool multiply;  ///< scale row r of dY by topk_weights[gather_indices[r]]
  bool weights_are_fp32;
};

}  // namespace moegemm::cuda::sm80
