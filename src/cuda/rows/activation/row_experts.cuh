#pragma once

#include "cuda/device/segments.cuh"

/// Whose row a row is, for kernels that read something per expert.
namespace moegemm::cuda {

/// Fills row_prefix[0 .. experts] in shared memory. Called by the whole block.
__device__ inline void share_row_prefix(const IndexArray& m_sizes, int experts, int rows,
                                        int* row_prefix) {
  if (threadIdx.x < kWarpSize) {
    scan_segments(m_sizes, experts, rows, 1, row_prefix, nullptr);
  }
  __syncthreads();
}

/// The expert of a row below row_prefix[experts].
__device__ inline int expert_of(const int* row_prefix, int experts, int row) {
  int low = 0, high = experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (row_prefix[middle] <= row ? low : high) = middle;
  }
  return low;
}

/// Dynamic shared memory of a block that knows its rows' experts.
inline int row_prefix_bytes(std::int64_t experts) {
  return static_cast<int>((experts + 1) * sizeof(int));
}

}  // namespace moegemm::cuda
