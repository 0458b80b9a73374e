#pragma once

#include "cuda/device/pipeline.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma_tf32.cuh"
#include "cuda/sm90/row_gemm/params.h"
#include "cuda/sm90/tf32_gemm/layout.cuh"

/// The contraction of tiles whose M side does not lie with the contraction fastest, as W in dX and
/// either operand in dW: wgmma takes no such TF32 from shared memory. So each warp loads its part
/// into registers, turned by who loads what. Forward is ../row_gemm/mma.cuh as it is.
namespace moegemm::cuda::sm90 {

/// The M side for two k8 steps of both blocks.
struct TurnedHalf {
  std::uint32_t a[2][2][4];  // [step][block]
};

/// Half `Half` of a stage of the M side: rows 16 * Half to 16 * Half + 15 of the contraction.
/// `offset` is where the lane's part of the first row is: see turned_offset.
template <int Half>
__device__ __forceinline__ void load_turned(const std::byte* weights, int offset,
                                            TurnedHalf& half) {
  const auto take = [](std::uint32_t(&a)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                       std::uint32_t a3) {
    a[0] = a0;
    a[1] = a1;
    a[2] = a2;
    a[3] = a3;
  };
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const std::byte* const rows = weights + (2 * Half + step) * 8 * kRowBytes;
    const uint4 low = *reinterpret_cast<const uint4*>(rows + offset);
    // Four rows on the swizzle flips the upper bit of the chunk.
    const uint4 high = *reinterpret_cast<const uint4*>(rows + (offset ^ 64) + 4 * kRowBytes);
    take(half.a[step][0], low.x, low.z, high.x, high.z);
    take(half.a[step][1], low.y, low.w, high.y, high.w);
  }
}

/// Where a lane's part of a stage's first row is; `slab` is the first of the warpgroup's slabs of
/// 32 columns, each of its warps has one.
__device__ __forceinline__ int turned_offset(int slab) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize % 4;
  return (slab + warp) * kWarpFeatures * kRowBytes + swizzle_128b(lane % 4, own_quad(lane));
}

template <int N>
__device__ __forceinline__ void multiply_turned_half(float (&d)[2][N / 2], const TurnedHalf& half,
                                                     std::uint64_t rows) {
  constexpr std::uint64_t kStep = ptx::kDescriptorStepK16<ptx::Major::kK>;
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      ptx::wgmma<float, N>(d[m], half.a[step][m], rows + step * kStep, true);
    }
  }
  ptx::wgmma_commit_group();
}

/// D[block] = A B^T over `blocks` stages, one at least, all of which are multiplied and free on
/// return. While the tensor cores have a half of a stage, the next one is loaded. Nothing is in
/// flight where a round of the loop ends, else ptxas serialises the multiplications; the other
/// warpgroup's are there to fill the gap.
template <typename Stages, int Count>
__device__ __forceinline__ void multiply_turned(float (&d)[2][Count], Stages& stages, int blocks) {
  constexpr int N = 2 * Count;
  constexpr std::uint64_t kHalf = 2 * ptx::kDescriptorStepK16<ptx::Major::kK>;
  TurnedHalf low, high;
#pragma unroll
  for (auto& block : d) {
#pragma unroll
    for (float& value : block) value = 0;
  }
  stages.wait();
  stages.template load<0>(low);
#pragma unroll 1
  for (int block = 1; block <= blocks; ++block) {
    const int slot = stages.slot();
    const std::uint64_t rows = ptx::smem_descriptor(ptx::shared_address(stages.rows()));
    multiply_turned_half<N>(d, low, rows);
    stages.template load<1>(high);
    multiply_turned_half<N>(d, high, rows + kHalf);
    stages.advance();
    ptx::wgmma_wait_group<1>();
    if (block < blocks) {
      stages.wait();
      stages.template load<0>(low);
    }
    ptx::wgmma_wait_group<0>();
    stages.release(slot);
  }
#pragma unroll
  for (auto& block : d) {
#pragma unroll
    for (float& value : block) ptx::accumulator_barrier(value);
  }
}

/// The stages of a dX tile.
template <typename Traits>
class DxStages {
 public:
  __device__ __forceinline__ DxStages(const RowGemmShared<Traits>& shared, int consumer,
                                      PipelineState<Traits::kStages>& state)
      : shared_(shared),
        state_(state),
        offset_(turned_offset(consumer * Traits::kConsumerStep / kWarpFeatures)) {}

  __device__ __forceinline__ int slot() const { return state_.slot; }
  __device__ __forceinline__ const std::byte* rows() const { return shared_.rows(state_.slot); }
  __device__ __forceinline__ void wait() { shared_.rings().stage.wait_full(state_); }
  template <int Half>
  __device__ __forceinline__ void load(TurnedHalf& half) const {
    load_turned<Half>(shared_.weights(state_.slot), offset_, half);
  }
  __device__ __forceinline__ void advance() { state_.advance(); }
  __device__ __forceinline__ void release(int slot) {
    __syncwarp();  // every lane has read weights
    if (threadIdx.x % kWarpSize == 0) ptx::mbarrier_arrive(&shared_.rings().stage.empty[slot]);
  }

 private:
  const RowGemmShared<Traits>& shared_;
  PipelineState<Traits::kStages>& state_;
  int offset_;
};

/// What multiply_tile and finish_tile are for operands that wgmma takes as they lie.
template <typename Traits, int Count>
__device__ __forceinline__ void accumulate_turned(float (&d)[2][Count],
                                                  const RowGemmShared<Traits>& shared, int consumer,
                                                  int blocks,
                                                  PipelineState<Traits::kStages>& stage) {
  DxStages<Traits> stages(shared, consumer, stage);
  multiply_turned(d, stages, blocks);
}

}  // namespace moegemm::cuda::sm90
