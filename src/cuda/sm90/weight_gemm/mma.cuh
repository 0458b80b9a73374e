#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/weight_gemm/params.h"

/// The contraction of one tile by one consumer warpgroup.
namespace moegemm::cuda::sm90 {

/// A filled stage as wgmma takes it: descriptors of the warpgroup's first 64 A columns and of B.
struct StageOperands {
  std::uint64_t a;
  std::uint64_t b;
  int slot;
};

/// A warpgroup's view of the stages that the load warps fill.
template <typename Traits>
class StageReader {
 public:
  static constexpr std::uint32_t kSlabStep = Traits::kSlabBytes >> 4;  ///< to the next 64 A columns

  __device__ __forceinline__ StageReader(WeightGemmShared<Traits>& shared, int group)
      : loads_(shared.loads),
        a_(ptx::smem_descriptor(ptx::shared_address(shared.a[0]), Traits::kSlabBytes) +
           2 * group * kSlabStep),
        b_(ptx::smem_descriptor(ptx::shared_address(shared.b[0]), Traits::kSlabBytes)) {}

  __device__ __forceinline__ StageOperands next() {
    loads_.wait_full(state_);
    // Gathered rows were written by the generic proxy; wgmma reads through the async proxy.
    ptx::fence_proxy_async_shared();
    const int slot = state_.slot;
    state_.advance();
    return {a_ + slot * (Traits::kABytes >> 4), b_ + slot * (Traits::kBBytes >> 4), slot};
  }

  __device__ __forceinline__ void release(int slot) {
    if (threadIdx.x % kWarpSize == 0) ptx::mbarrier_arrive(&loads_.empty[slot]);
  }

 private:
  Ring<Traits::kStages>& loads_;
  std::uint64_t a_;
  std::uint64_t b_;
  PipelineState<Traits::kStages> state_;
};

/// acc (+)= A[64 columns] B[Cols columns] over the first Rows rows of a stage, as one wgmma group.
template <typename Traits, int Cols, bool Start, int Rows = Traits::kRows>
__device__ __forceinline__ void multiply_stage(float* acc, std::uint64_t a, std::uint64_t b) {
  using ptx::Major;
  using T = typename Traits::Element;
  constexpr std::uint32_t kStep = ptx::kDescriptorStepK16<Major::kMn>;
#pragma unroll
  for (int k = 0; k < Rows / kGroupRows; ++k) {
    if (Start && k == 0) {
      ptx::wgmma_start<T, Cols, Major::kMn, Major::kMn>(acc, a, b);
    } else {
      ptx::wgmma<T, Cols, Major::kMn, Major::kMn>(acc, a + k * kStep, b + k * kStep, true);
    }
  }
  ptx::wgmma_commit_group();
}

/// Issues a whole tile of `rows` rows and Cols B columns, block 0 into acc0 and block 1 into acc1,
/// and calls `under_lead` while the first stages of block 0 multiply. Returns with the last stage's
/// two groups in flight: its slot is the caller's to release.
template <int Cols, typename Traits, typename UnderLead>
__device__ __forceinline__ int multiply_tile(StageReader<Traits>& loads, int rows,
                                             float (&acc0)[Cols / 2], float (&acc1)[Cols / 2],
                                             const UnderLead& under_lead) {
  constexpr std::uint32_t kSlabStep = StageReader<Traits>::kSlabStep;
  static_assert(kLeadStages == 2);
  const int stages = stages_of(rows, Traits::kRows);
  const int whole = whole_stages_of(rows, Traits::kRows);
  const StageOperands first = loads.next();
  ptx::wgmma_fence();
  multiply_stage<Traits, Cols, true>(acc0, first.a, first.b);
  const StageOperands second = loads.next();
  ptx::wgmma_fence();
  multiply_stage<Traits, Cols, false>(acc0, second.a, second.b);
  under_lead();
  ptx::wgmma_fence();
  multiply_stage<Traits, Cols, true>(acc1, first.a + kSlabStep, first.b);
  multiply_stage<Traits, Cols, false>(acc1, second.a + kSlabStep, second.b);
  ptx::wgmma_wait_group<1>();
  loads.release(first.slot);
  int previous = second.slot;
  int stage = kLeadStages;
#pragma unroll 1
  for (; stage < whole; ++stage) {
    const StageOperands current = loads.next();
    ptx::wgmma_fence();
    multiply_stage<Traits, Cols, false>(acc0, current.a, current.b);
    multiply_stage<Traits, Cols, false>(acc1, current.a + kSlabStep, current.b);
    ptx::wgmma_wait_group<2>();
    loads.release(previous);
    previous = current.slot;
  }
  if (stage < stages) {  // apart: a branch in the loop would make ptxas serialise it (C7520)
    const StageOperands current = loads.next();
    ptx::wgmma_fence();
    multiply_stage<Traits, Cols, false, kGroupRows>(acc0, current.a, current.b);
    multiply_stage<Traits, Cols, false, kGroupRows>(acc1, current.a + kSlabStep, current.b);
    ptx::wgmma_wait_group<2>();
    loads.release(previous);
    previous = current.slot;
  }
  return previous;
}

template <int Pending, int Count>
__device__ __forceinline__ void wait_for_accumulators(float (&acc)[Count]) {
  ptx::wgmma_wait_group<Pending>();
#pragma unroll
  for (int i = 0; i < Count; ++i) ptx::accumulator_barrier(acc[i]);
}

/// Lets the stages of a tile go by.
template <typename Traits>
__device__ __forceinline__ void skip_tile(StageReader<Traits>& loads, int stages) {
  for (int stage = 0; stage < stages; ++stage) loads.release(loads.next().slot);
}

/// Calls `body` with the width of the tile's B columns as a constant: all, or all but one slab if
/// no more are left. A third width spills registers.
template <typename Traits, typename Body>
__device__ __forceinline__ void with_tile_cols(int cols_left, const Body& body) {
  if constexpr (Traits::kBSlabs > 1) {
    if (cols_left <= Traits::kBCols - kSlabCols) {
      body(std::integral_constant<int, Traits::kBCols - kSlabCols>{});
      return;
    }
  }
  body(std::integral_constant<int, Traits::kBCols>{});
}

}  // namespace moegemm::cuda::sm90
