#pragma once

#include "cuda/device/pipeline.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/row_gemm/params.h"

/// The contraction of one tile by one consumer warpgroup.
namespace moegemm::cuda::sm90 {

/// From a warpgroup's block to its next. Those of TF32 take turns, eight rows each: then a thread
/// has neighbouring features (see ../tf32_gemm/store.cuh).
template <typename Traits>
constexpr int kBlockBytes = (Traits::kTf32 ? 8 : Traits::kBlockStep) * kRowBytes;
template <typename Traits>
constexpr std::uint64_t kGroupsApart = Traits::kTf32 ? std::uint64_t{1024 >> 4} << 32 : 0;

/// One stage of the contraction: four k16 steps (k8 of TF32, as many bytes) for each of the
/// warpgroup's m64 blocks.
template <typename Traits, int N, bool First>
__device__ __forceinline__ void multiply_stage(float (&d)[Traits::kBlocks][N / 2],
                                               const RowGemmShared<Traits>& shared,
                                               int panel_offset,
                                               const PipelineState<Traits::kStages>& stage) {
  using T = typename Traits::Element;
  constexpr ptx::Major kWeights = Traits::kDepthMajor ? ptx::Major::kK : ptx::Major::kMn;
  shared.rings().stage.wait_full(stage);
  // cp.async wrote through the generic proxy; wgmma reads through the async one.
  if constexpr (Traits::kGathered && !Traits::kTf32) ptx::fence_proxy_async_shared();
  const std::uint64_t a =
      ptx::smem_descriptor(ptx::shared_address(shared.weights(stage.slot) + panel_offset)) +
      kGroupsApart<Traits>;
  const std::uint64_t b = ptx::smem_descriptor(ptx::shared_address(shared.rows(stage.slot)));
  ptx::wgmma_fence();
#pragma unroll
  for (int k16 = 0; k16 < kDepth / 16; ++k16) {
#pragma unroll
    for (int m = 0; m < Traits::kBlocks; ++m) {
      const std::uint64_t panel =
          a + m * (kBlockBytes<Traits> >> 4) + k16 * ptx::kDescriptorStepK16<kWeights>;
      const std::uint64_t rows = b + k16 * ptx::kDescriptorStepK16<ptx::Major::kK>;
      if (First && k16 == 0) {
        ptx::wgmma_start<T, N, kWeights, ptx::Major::kK>(d[m], panel, rows);
      } else {
        ptx::wgmma<T, N, kWeights, ptx::Major::kK>(d[m], panel, rows, true);
      }
    }
  }
  ptx::wgmma_commit_group();
}

/// D[block] = W[64 features, depth] rows[N, depth]^T for each of the warpgroup's m64 blocks. The
/// order of the contraction is the same for every tile shape, so a row's bits do not depend on the
/// tile it falls into. On return the tensor cores may still be working: see finish_tile.
template <typename Traits, int N>
__device__ __forceinline__ void multiply_tile(float (&d)[Traits::kBlocks][N / 2],
                                              const RowGemmShared<Traits>& shared, int consumer,
                                              int blocks, PipelineState<Traits::kStages>& stage) {
  auto& ring = shared.rings().stage;
  const bool leader = threadIdx.x % 32 == 0;
  const int panel_offset = consumer * Traits::kConsumerStep * kRowBytes;
  multiply_stage<Traits, N, true>(d, shared, panel_offset, stage);
  int previous = stage.slot;
  stage.advance();
#pragma unroll 1  // 4x unrolling of every N variant triples the code for no gain
  for (int block = 1; block < blocks; ++block) {
    multiply_stage<Traits, N, false>(d, shared, panel_offset, stage);
    ptx::wgmma_wait_group<1>();
    if (leader) ptx::mbarrier_arrive(&ring.empty[previous]);
    previous = stage.slot;
    stage.advance();
  }
}

/// Waits for the accumulators and frees the last stage.
template <typename Traits, int N>
__device__ __forceinline__ void finish_tile(float (&d)[Traits::kBlocks][N / 2],
                                            const RowGemmShared<Traits>& shared,
                                            const PipelineState<Traits::kStages>& after) {
  ptx::wgmma_wait_group<0>();
#pragma unroll
  for (int m = 0; m < Traits::kBlocks; ++m) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) ptx::accumulator_barrier(d[m][i]);
  }
  const int last = after.slot == 0 ? Traits::kStages - 1 : after.slot - 1;
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.rings().stage.empty[last]);
}

}  // namespace moegemm::cuda::sm90
