#pragma once

#include "cuda/device/host_device.h"
#include "cuda/device/warp.h"
#include "cuda/sm80/tile/traits.h"

/// Which elements of a tile a thread accumulates. mma.sync decides that for the tensor cores; exact
/// fp32 has an order of its own.
namespace moegemm::cuda::sm80 {

/// Where a warp's part of the tile begins. With fewer row blocks the warps' parts stay adjacent.
template <typename Shape>
__device__ __forceinline__ int warp_row(int row_blocks) {
  return warp_id() / Shape::kWarpCols * row_blocks * 16;
}
template <typename Shape>
__device__ __forceinline__ int warp_col() {
  return warp_id() % Shape::kWarpCols * Shape::kColBlocks * 8;
}

/// Exact fp32: the row and the column of a lane among the 8 x 4 of its warp. A load of 16 bytes
/// passes shared memory twice, not four times, if lanes i and i ^ 1 read the same, or lanes i and
/// i ^ 2, in the whole warp: the former share rows, the latter columns.
MOEGEMM_HOST_DEVICE constexpr int float_lane_row(int lane) { return lane >> 1 & 7; }
MOEGEMM_HOST_DEVICE constexpr int float_lane_col(int lane) { return (lane & 1) | (lane >> 3 & 2); }

/// Row `index` of the 2 * kRowBlocks that this lane accumulates, relative to the warp's. Exact fp32
/// takes four neighbours at a time where those are contiguous.
template <typename Traits>
__device__ __forceinline__ int lane_row(int index) {
  if constexpr (Traits::kMath != Math::kFloat) return index * 8 + lane_id() / 4;
  if constexpr (Traits::kAMajor == Major::kDepth) return index * 8 + float_lane_row(lane_id());
  return index / 4 * 32 + float_lane_row(lane_id()) * 4 + index % 4;
}

/// The first of the two columns of column block j that this lane accumulates, relative to the
/// warp's. Exact fp32: those of blocks j and j + 1, j even, are neighbours.
template <typename Traits>
__device__ __forceinline__ int lane_col(int j) {
  if constexpr (Traits::kMath == Math::kFloat) {
    return j / 2 * 16 + float_lane_col(lane_id()) * 4 + j % 2 * 2;
  }
  const int t = lane_id() % 4;
  return Traits::kPlacedColumns ? j / 4 * 32 + t * 8 + j % 4 * 2 : j * 8 + t * 2;
}

}  // namespace moegemm::cuda::sm80
