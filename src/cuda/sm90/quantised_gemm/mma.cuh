#pragma once

#include "cuda/device/pipeline.cuh"
#include "cuda/device/swizzle.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma_registers.cuh"
#include "cuda/sm90/quantised_gemm/fragments.cuh"
#include "cuda/sm90/quantised_gemm/streamed_fragments.cuh"

/// The contraction of one tile by one consumer warpgroup, weights decoded on the way. Its steps are
/// those of ../row_gemm/mma.cuh in the same order, so that a row has the bits of a plain product
/// with dequantised weights.
namespace moegemm::cuda::sm90 {

template <typename Traits>
using FragmentsOf =
    std::conditional_t<Traits::kTabled, Fragments<Traits>, StreamedFragments<Traits>>;

/// Hands a stage back. Each lane arrives for itself, since each has read packed weights and scales;
/// see ScaleWriter::write.
template <int Slots>
__device__ __forceinline__ void release(Ring<Slots>& ring, int slot) {
  ptx::mbarrier_arrive(&ring.empty[slot]);
}

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

/// A half whose scales may be those of two products.
template <int Half, typename Traits>
__device__ __forceinline__ void decode_excess(const Fragments<Traits>& fragments, HalfStage& a) {
  if (fragments.has_excess()) {
    fragments.template decode<Half>(a);
    fragments.template multiply_excess<Half>(a);
  } else {
    fragments.template decode<Half>(a);
  }
}

/// The stages that are left, some of which have scales of two products: one half after the other.
template <typename Traits, int N>
__device__ __forceinline__ void multiply_excess_stages(float (&d)[N / 2],
                                                       const RowGemmShared<Traits>& shared,
                                                       int block, int blocks,
                                                       Fragments<Traits>& fragments,
                                                       PipelineState<Traits::kStages>& stage) {
  constexpr std::uint64_t kHalf = 2 * ptx::kDescriptorStepK16<ptx::Major::kK>;
  auto& ring = shared.rings().stage;
  HalfStage a;
#pragma unroll 1
  for (; block < blocks; ++block) {
    ring.wait_full(stage);
    if constexpr (Traits::kGathered) ptx::fence_proxy_async_shared();
    const std::uint64_t rows = ptx::smem_descriptor(ptx::shared_address(shared.rows(stage.slot)));
    fragments.template load<0>(shared, stage.slot);
    decode_excess<0>(fragments, a);
    multiply_half<Traits, N>(d, a, rows, true);
    ptx::wgmma_wait_group<0>();
    fragments.template load<1>(shared, stage.slot);
    decode_excess<1>(fragments, a);
    multiply_half<Traits, N>(d, a, rows + kHalf, true);
    ptx::wgmma_wait_group<0>();
    release(ring, stage.slot);
    stage.advance();
  }
}

/// The stages of packed weights in tiles of many rows. On return all are multiplied and free.
///
/// While the tensor cores have one half, the other is decoded. A round ends with a single k16 step
/// in flight: the registers that are in flight where a loop ends are one N's alone, and where those
/// of all N are too many, ptxas serialises everything (C7512).
template <typename Traits, int N>
__device__ __forceinline__ void multiply_tabled(float (&d)[N / 2],
                                                const RowGemmShared<Traits>& shared, int blocks,
                                                Fragments<Traits>& fragments,
                                                PipelineState<Traits::kStages>& stage) {
  using T = typename Traits::Element;
  constexpr std::uint64_t kStep = ptx::kDescriptorStepK16<ptx::Major::kK>;
  auto& ring = shared.rings().stage;
  int block = 0;
  HalfStage a[2];
#pragma unroll
  for (float& value : d) value = 0;  // outside the loop, or ptxas serialises the multiplications
  ring.wait_full(stage);
  // cp.async wrote the rows through the generic proxy; wgmma reads through the async one.
  if constexpr (Traits::kGathered) ptx::fence_proxy_async_shared();
  fragments.template load<0>(shared, stage.slot);
  if (!fragments.has_excess()) {
    fragments.template decode<0>(a[0]);
    int previous = 0;
#pragma unroll 1
    do {
      PipelineState<Traits::kStages> next = stage;
      next.advance();
      if (block + 1 == blocks) next = stage;  // decoded once more, in vain: no branch
      const std::uint64_t rows = ptx::smem_descriptor(ptx::shared_address(shared.rows(stage.slot)));
      multiply_half<Traits, N>(d, a[0], rows, true);
      fragments.template load<1>(shared, stage.slot);
      ptx::wgmma_wait_group<1>();
      if (block > 0) release(ring, previous);
      fragments.template decode<1>(a[1]);
      ptx::wgmma_fence();
      ptx::wgmma<T, N>(d, a[1][0], rows + 2 * kStep, true);
      ptx::wgmma_commit_group();
      ptx::wgmma<T, N>(d, a[1][1], rows + 3 * kStep, true);
      ptx::wgmma_commit_group();
      ring.wait_full(next);
      if constexpr (Traits::kGathered) ptx::fence_proxy_async_shared();
      fragments.template load<0>(shared, next.slot);
      ptx::wgmma_wait_group<2>();
      fragments.template decode<0>(a[0]);
      ptx::wgmma_wait_group<1>();
      previous = stage.slot;
      stage = next;
      ++block;
    } while (block < blocks && !fragments.has_excess());
    ptx::wgmma_wait_group<0>();
    release(ring, previous);
    if (block == blocks) stage.advance();
  }
  if constexpr (Traits::kKernel.weights == WeightFormat::kMxfp4) {
    if (block < blocks) {
      multiply_excess_stages<Traits, N>(d, shared, block, blocks, fragments, stage);
    }
  }
}

/// Streaming tiles: multiplies half `Half` of a stage and all that follow; while the tensor cores
/// have one, the next is decoded. After the last one that is the first half of stage `next`.
template <typename Traits, int N, int Half>
__device__ __forceinline__ void multiply_halves(float (&d)[N / 2],
                                                const RowGemmShared<Traits>& shared,
                                                StreamedFragments<Traits>& fragments,
                                                HalfStage (&a)[2], int block, int previous,
                                                const PipelineState<Traits::kStages>& stage,
                                                const PipelineState<Traits::kStages>& next) {
  const std::byte* panel = shared.rows(stage.slot) + Half / 2 * Traits::kRowsBytes;
  const std::uint64_t rows = ptx::smem_descriptor(ptx::shared_address(panel)) +
                             Half % 2 * 2 * ptx::kDescriptorStepK16<ptx::Major::kK>;
  multiply_half<Traits, N>(d, a[Half % 2], rows, Half > 0 || block > 0);
  constexpr bool kLast = Half + 1 == 2 * Traits::kPanels;
  if constexpr (kLast) {
    fragments.next_scales(block + 1);
    shared.rings().stage.wait_full(next);
    fragments.template load<0>(shared, next.slot);
    ptx::wgmma_wait_group<1>();
    fragments.template decode<0>(a[0]);
  } else {
    fragments.template load<Half + 1>(shared, stage.slot);
    ptx::wgmma_wait_group<1>();
    if (Half == 0 && block > 0) release(shared.rings().stage, previous);
    fragments.template decode<Half + 1>(a[(Half + 1) % 2]);
    multiply_halves<Traits, N, Half + 1>(d, shared, fragments, a, block, previous, stage, next);
  }
}

/// The stages of packed weights in streaming tiles. On return all are multiplied and free.
template <typename Traits, int N>
__device__ __forceinline__ void multiply_streamed(float (&d)[N / 2],
                                                  const RowGemmShared<Traits>& shared, int blocks,
                                                  StreamedFragments<Traits>& fragments,
                                                  PipelineState<Traits::kStages>& stage) {
  auto& ring = shared.rings().stage;
  int previous = 0;
  HalfStage a[2];
#pragma unroll
  for (float& value : d) value = 0;  // outside the loop, or ptxas serialises the multiplications
  ring.wait_full(stage);
  fragments.template load<0>(shared, stage.slot);
  fragments.next_scales(0);
  fragments.template decode<0>(a[0]);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    PipelineState<Traits::kStages> next = stage;
    next.advance();
    if (block + 1 == blocks) next = stage;  // decoded once more, in vain: no branch
    // cp.async wrote the rows through the generic proxy; wgmma reads through the async one.
    if constexpr (Traits::kGathered) ptx::fence_proxy_async_shared();
    multiply_halves<Traits, N, 0>(d, shared, fragments, a, block, previous, stage, next);
    previous = stage.slot;
    stage = next;
  }
  ptx::wgmma_wait_group<0>();
  release(ring, previous);
  stage.advance();
}

/// The fragment of a k16 step of plain weights of dX, features in the order of decoded ones: two
/// bytes at a time, for stages that are few.
template <typename Traits>
__device__ __forceinline__ void load_plain_fragment(const std::byte* panel, std::uint32_t (&a)[4]) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = Traits::feature_of(warp, lane, i % 2);
    const auto element = [&](int n) -> std::uint32_t {
      return *reinterpret_cast<const std::uint16_t*>(panel + swizzle_128b(n, column / 8) +
                                                     column % 8 * 2);
    };
    const int n = lane % 4 * 2 + i / 2 * 8;
    a[i] = element(n) | element(n + 1) << 16;
  }
}

/// The low-rank part, whose weights are plain: 16 of its depth in a stage.
template <typename Traits, int N>
__device__ __forceinline__ void multiply_low_rank(float (&d)[N / 2],
                                                  const RowGemmShared<Traits>& shared, int consumer,
                                                  int steps,
                                                  PipelineState<Traits::kStages>& stage) {
  using T = typename Traits::Element;
  auto& ring = shared.rings().stage;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ring.wait_full(stage);
    const std::byte* panel = shared.weights(stage.slot) + consumer * 64 * Traits::kLowDepth * 2;
    const std::uint64_t rows =
        ptx::smem_descriptor_32b(ptx::shared_address(shared.rows(stage.slot)));
    if constexpr (Traits::kDepthMajor) {
      ptx::wgmma_fence();
      ptx::wgmma<T, N, ptx::Major::kK, ptx::Major::kK>(
          d, ptx::smem_descriptor_32b(ptx::shared_address(panel)), rows, true);
    } else {
      std::uint32_t a[4];
      load_plain_fragment<Traits>(panel, a);
      ptx::wgmma_fence();
      ptx::wgmma<T, N>(d, a, rows, true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    release(ring, stage.slot);
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
    FragmentsOf<Traits> fragments(params, shared, shared.tiles()[tile_slot], consumer);
    const int blocks = ceil_div(params.depth, Traits::kStageDepth);
    if constexpr (Traits::kTabled) {
      multiply_tabled<Traits, N>(d[0], shared, blocks, fragments, stage);
    } else {
      multiply_streamed<Traits, N>(d[0], shared, blocks, fragments, stage);
    }
  }
  const int steps = ceil_div(params.low_rank, kDepth) * (kDepth / Traits::kLowDepth);
  if (steps > 0) multiply_low_rank<Traits, N>(d[0], shared, consumer, steps, stage);
#pragma unroll
  for (int i = 0; i < Count; ++i) ptx::accumulator_barrier(d[0][i]);
}

/// By all threads of a block, before they meet for the first time.
template <typename Traits>
__device__ __forceinline__ void prepare_decoding(const RowGemmShared<Traits>& shared) {
  if constexpr (Traits::kPairTable) {
    Decoder<WeightFormat::kNf4>::fill(shared.decode_tables());
  }
}

}  // namespace moegemm::cuda::sm90
