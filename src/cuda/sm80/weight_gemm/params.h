#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device/row_pitch.h"
#include "cuda/device/schedule/weight_tiles.h"
#include "cuda/sm80/tile/params.h"

namespace moegemm::cuda::sm80 {

/// What a dW kernel is launched with. A is dY, B is X; at most one of them is gathered.
struct WeightGemmParams : RoutingParams {
  const std::byte* dy;
  const std::byte* x;
  RowPitch dy_pitch;
  RowPitch x_pitch;
  OutputView out;              ///< of expert 0: [N, K]
  std::int64_t expert_stride;  ///< elements between the outputs of two experts
  int n;
  WeightTiling tiling;
  bool indexed;  ///< a row whose index is out of range is absent in both operands
  bool gather_dy;
  bool gather_x;
};

}  // namespace moegemm::cuda::sm80
