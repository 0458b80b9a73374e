#pragma once

namespace moegemm::cuda {

constexpr unsigned kFullMask = 0xffffffffu;
constexpr int kWarpSize = 32;

#if defined(__CUDACC__)
__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / kWarpSize; }
#endif

}  // namespace moegemm::cuda
