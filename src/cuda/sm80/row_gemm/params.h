#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device/row_pitch.h"
#include "cuda/sm80/tile/params.h"
#include "moegemm/quantization.h"

namespace moegemm::cuda::sm80 {

/// The scales of a quantised W: that of W_e[n, k] is at
/// e * expert_bytes + (n >> row_shift) * row_bytes + (k >> column_shift << size_shift).
struct WeightScales {
  const std::byte* data;
  const std::byte* end;
  std::int64_t expert_bytes;
  std::int64_t row_bytes;
  int row_shift;
  int column_shift;
  int size_shift;
  WeightFormat format;
  ScaleType type;
};

/// What a row GEMM is launched with. Forward: features = N, depth = K, rows of X. dX: features =
/// K, depth = N, rows of dY.
struct RowGemmParams : RoutingParams {
  const std::byte* rows;
  RowPitch row_pitch;
  const std::byte* weights;   ///< packed, if they are quantised
  std::int64_t weight_bytes;  ///< pitch of a row of W
  std::int64_t expert_bytes;
  WeightScales scales;
  OutputView out;
  const void* bias;  ///< [experts, out.cols] of the input type; null: none
  std::int64_t bias_stride;
  const std::byte* low_rows;  ///< [M, low_rank], in order; its weights lie as the others do
  const std::byte* low_weights;
  std::int64_t low_row_bytes;
  std::int64_t low_weight_bytes;
  std::int64_t low_expert_bytes;
  int depth;
  int low_rank;     ///< more depth, after it: the low-rank part's; 0: none
  int low_blocks;   ///< of the kernel's depth
  bool gather;      ///< rows are read through gather_indices
  bool scatter;     ///< result row r goes to flat row gather_indices[r]
  bool full_first;  ///< the order of tiles: traits.h
};

}  // namespace moegemm::cuda::sm80
