#pragma once

#include "cuda/device/element_type.h"
#include "cuda/sm80/weight_gemm/load.cuh"
#include "cuda/sm80/weight_gemm/mma.cuh"
#include "cuda/sm80/weight_gemm/store.cuh"

/// dW_e = dY_e^T X_e on every GPU from sm_80 up, all experts in one persistent launch. The warps'
/// roles are those of row_gemm/kernel.cuh; both operands are read as they lie in memory, rows of
/// the contraction with contiguous columns, and turned by ldmatrix.
namespace moegemm::cuda::sm80 {

template <typename Traits, typename Feed>
__device__ __forceinline__ void compute_tile(const WeightGemmParams& params, const WeightTile& tile,
                                             Feed& feed) {
  Accumulators<Traits> acc;
  clear<Traits>(acc);
  multiply_rows<Traits>(params, tile, feed, acc);
  store_weights<Traits>(params, tile, acc);
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::Shape::kThreads, Traits::Shape::kBlocksPerMultiprocessor)
    weight_gemm_kernel(const __grid_constant__ WeightGemmParams params) {
  using Shape = typename Traits::Shape;
  using Layout = WeightGemmLayout<Shape, Traits::kElementBytes>;
  static_assert(sizeof(WeightTile) <= kTileBytes);
  extern __shared__ __align__(kStageAlignment) std::byte shared[];
  auto* tiles = reinterpret_cast<WeightTile*>(shared + Layout::kTiles);
  const ExpertTable table = {
      reinterpret_cast<int*>(shared + Layout::kRowPrefix),
      reinterpret_cast<unsigned short*>(shared + Layout::order(params.experts))};
  if (threadIdx.x < kWarpSize) {
    build_expert_table<Traits>(params, table,
                               *reinterpret_cast<int(*)[kSizeClasses]>(shared + Layout::kCounts));
  }
  auto* scales = reinterpret_cast<float*>(shared + Layout::kScales);
  auto* ring = reinterpret_cast<StageRing<Shape>*>(shared + Layout::kRing);
  if constexpr (Shape::kLoadWarps > 0) {
    if (threadIdx.x == Shape::kFirstCopyThread) ring->prepare();
  }
  __syncthreads();

  if constexpr (Shape::kLoadWarps > 0) {
    if (threadIdx.x >= Shape::kFirstCopyThread) {
      ptx::setmaxnreg_dec<kLoadRegisters>();
      WeightStreamLoader<Traits> loader(params, scales);
      WeightScheduler<Shape> scheduler(params, table);
      copy_tiles(loader, scheduler, shared, tiles, *ring);
      scheduler.leave();
      return;
    }
    ptx::setmaxnreg_inc<kMultiplyRegisters>();
    StageReader<Shape> feed(shared, *ring, scales, Traits::kDepth);
    for (int number = 0;; ++number) {
      feed.wait();
      const WeightTile& tile = tiles[number % kTileSlots];
      if (tile.is_end()) return;
      compute_tile<Traits>(params, tile, feed);
    }
  } else {
    using Loader = WeightLoader<Traits>;
    auto* rows = reinterpret_cast<RowTable<Traits>*>(shared + Layout::kRowTable);
    Loader loader(params, tiles, *rows, scales);
    WeightScheduler<Shape> scheduler(params, table);
    TileFeed<Traits, Loader, WeightScheduler<Shape>> feed(loader, scheduler, shared, tiles);
    for (int number = 0;; ++number) {
      const WeightTile& tile = tiles[number % kTileSlots];  // not copied: registers are short here
      if (tile.is_end()) break;
      compute_tile<Traits>(params, tile, feed);
    }
    scheduler.leave();
  }
}

template <WeightGemm Kernel, DType D>
KernelFunctions weight_gemm_functions() {
  using Traits = GemmTraits<ShapeOf<Kernel>, ElementType<D>, Kernel.math, Major::kOuter,
                            Major::kOuter, Kernel.loads>;
  return {.plain = reinterpret_cast<const void*>(&weight_gemm_kernel<Traits>)};
}

}  // namespace moegemm::cuda::sm80
