#pragma once

#include <cstdint>

#include "cuda/passes/elements.cuh"

/// Sums over a whole thread block. Every thread of the block must call; blocks are whole warps.
namespace moegemm::cuda {

/// The lanes are added in a tree, the same one each time.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullMask, value, distance);
  }
  return value;
}

/// Inclusive prefix sum over the lanes of a warp.
template <typename T>
__device__ inline T warp_inclusive_sum(T value) {
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (unsigned distance = 1; distance < 32; distance *= 2) {
    const T before = __shfl_up_sync(kFullMask, value, distance);
    if (lane >= distance) {
      value += before;
    }
  }
  return value;
}

/// Sum of `value` over the threads before this one; `total` is that over all. `warp_sums` is shared
/// memory for 32 values, free again when this returns.
template <typename T>
__device__ inline T block_exclusive_sum(T value, T* warp_sums, T& total) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T inclusive = warp_inclusive_sum(value);
  if (lane == 31) {
    warp_sums[warp] = inclusive;
  }
  __syncthreads();
  if (warp == 0) {
    const T sum = lane < blockDim.x / 32 ? warp_sums[lane] : T(0);
    warp_sums[lane] = warp_inclusive_sum(sum);
  }
  __syncthreads();
  total = warp_sums[31];
  const T before = (warp > 0 ? warp_sums[warp - 1] : T(0)) + inclusive - value;
  __syncthreads();
  return before;
}

/// Rows that belong to an expert: the sum of m_sizes with negative sizes as 0, at most `rows`.
__device__ inline std::int64_t block_routed_rows(const void* m_sizes, bool is_64_bit,
                                                 std::int64_t experts, std::int64_t rows) {
  __shared__ std::int64_t warp_sums[32];
  std::int64_t mine = 0;
  for (std::int64_t e = threadIdx.x; e < experts; e += blockDim.x) {
    // Each size cut at `rows`: the clipped sum stays the same and cannot overflow.
    const std::int64_t size = load_index(m_sizes, is_64_bit, e);
    mine += size < 0 ? 0 : (size < rows ? size : rows);
  }
  std::int64_t total = 0;
  block_exclusive_sum(mine, warp_sums, total);
  return total < rows ? total : rows;
}

}  // namespace moegemm::cuda
