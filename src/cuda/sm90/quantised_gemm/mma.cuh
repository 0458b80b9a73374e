#pragma once

#include "cuda/device/pipeline.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma_registers.cuh"
#include "cuda/sm90/quantised_gemm/fragments.cuh"

/// The contraction of one tile by one consumer warpgroup, weights decoded on the way. Its steps are
/// those of ../row_gemm/mma.cuh in the same order, so that a row has the bits of a plain product
/// with dequantised weights.
namespace moegemm::cuda::sm90 {

/// Both k16 steps of a half.
template <typename Traits, int N>
__device__ __forceinline__ void multiply_half(float (&d)[N / 2], const HalfStage& a,
                                              std::uint64_t rows, bool accumulate) {
  using T = typename Traits::Element;
  constexpr std::uint64_t kStep = ptx::kDescriptorStepK16<ptx::Major::kK>;
  ptx::wgmma_fence();
  ptx::wgmma<T, N>(d, a[0], rows, accumulate);
  ptx::wgmma<T, N>(d, a[1], rows + kStep, true);
  ptx::wgmma_commit_group();
}

/// The stages of packed weights. On return all are multiplied and free.
template <typename Traits, int N>
__device__ __forceinline__ void multiply_decoded(float (&d)[N / 2],
                                                 const RowGemmShared<Traits>& shared, int blocks,
                                                 Fragments<Traits>& fragments,
                                                 PipelineState<Traits::kStages>& stage) {
  auto& ring = shared.rings().stage;
  const bool leader = threadIdx.x % kWarpSize == 0;
  HalfStage first, second;
  int previous = stage.slot;
#pragma unroll
  for (float& value : d) value = 0;  // ptxas wants them defined outside the loop
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    fragments.next_scales(block);
    ring.wait_full(stage);
    const std::byte* panel = shared.weights(stage.slot);
    const std::uint64_t rows = ptx::smem_descriptor(ptx::shared_address(shared.rows(stage.slot)));
    fragments.template load<0>(panel);
    // All but the last half of the last stage: the registers of its first half are free.
    ptx::wgmma_wait_group<1>();
    fragments.template decode<0>(first);
    // cp.async wrote the rows through the generic proxy; wgmma reads through the async one.
    if constexpr (Traits::kGathered) ptx::fence_proxy_async_shared();
    multiply_half<Traits, N>(d, first, rows, block > 0);
    fragments.template load<1>(panel);
    ptx::wgmma_wait_group<1>();
    if (leader && block > 0) ptx::mbarrier_arrive(&ring.empty[previous]);
    fragments.template decode<1>(second);
    multiply_half<Traits, N>(d, second, rows + 2 * ptx::kDescriptorStepK16<ptx::Major::kK>, true);
    previous = stage.slot;
    stage.advance();
  }
  ptx::wgmma_wait_group<0>();
  if (leader) ptx::mbarrier_arrive(&ring.empty[previous]);
}

/// The low-rank part, whose weights are plain: 16 of its depth in a stage.
template <typename Traits, int N>
__device__ __forceinline__ void multiply_low_rank(float (&d)[N / 2],
                                                  const RowGemmShared<Traits>& shared, int consumer,
                                                  int steps,
                                                  PipelineState<Traits::kStages>& stage) {
  using T = typename Traits::Element;
  constexpr ptx::Major kWeights = Traits::kDepthMajor ? ptx::Major::kK : ptx::Major::kMn;
  auto& ring = shared.rings().stage;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ring.wait_full(stage);
    const std::uint32_t panel =
        ptx::shared_address(shared.weights(stage.slot)) + consumer * 64 * Traits::kLowDepth * 2;
    const std::uint64_t weights =
        Traits::kDepthMajor ? ptx::smem_descriptor_32b(panel) : ptx::smem_descriptor(panel);
    const std::uint64_t rows =
        ptx::smem_descriptor_32b(ptx::shared_address(shared.rows(stage.slot)));
    ptx::wgmma_fence();
    ptx::wgmma<T, N, kWeights, ptx::Major::kK>(d, weights, rows, true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    if (threadIdx.x % kWarpSize == 0) ptx::mbarrier_arrive(&ring.empty[stage.slot]);
    stage.advance();
  }
}

/// The product of a consumer's next tile: what accumulate_tile is for plain weights.
template <typename Traits, int Count>
__device__ __forceinline__ void accumulate_decoded(const RowGemmParams& params,
                                                   const RowGemmShared<Traits>& shared,
                                                   int consumer, int tile_slot,
                                                   PipelineState<Traits::kStages>& stage,
                                                   float (&d)[1][Count]) {
  constexpr int N = 2 * Count;
  {
    Fragments<Traits> fragments(params, shared, shared.tiles()[tile_slot], consumer);
    multiply_decoded<Traits, N>(d[0], shared, ceil_div(params.depth, kDepth), fragments, stage);
  }
  const int steps = ceil_div(params.low_rank, kDepth) * (kDepth / Traits::kLowDepth);
#ifdef X_BAR
#pragma unroll
  for (int i = 0; i < Count; ++i) ptx::accumulator_barrier(d[0][i]);
#endif
#ifndef X_NOLOW
  if (steps > 0) multiply_low_rank<Traits, N>(d[0], shared, consumer, steps, stage);
#endif
#pragma unroll
  for (int i = 0; i < Count; ++i) ptx::accumulator_barrier(d[0][i]);
}

/// By all threads of a block, before they meet for the first time.
template <typename Traits>
__device__ __forceinline__ void prepare_decoding(const RowGemmShared<Traits>& shared) {
  if constexpr (Traits::kKernel.weights == WeightFormat::kNf4) {
    Decoder<WeightFormat::kNf4>::fill(shared.decode_tables());
  }
}

}  // namespace moegemm::cuda::sm90
