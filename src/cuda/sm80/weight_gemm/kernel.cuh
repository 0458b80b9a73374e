#pragma once

#include "cuda/device/element.cuh"
#include "cuda/sm80/weight_gemm/load.cuh"
#include "cuda/sm80/weight_gemm/mma.cuh"
#include "cuda/sm80/weight_gemm/store.cuh"
#include "cuda/sm80/weight_gemm/traits.h"

/// dW_e = dY_e^T X_e on every GPU from sm_80 up, all experts in one persistent launch. The warps'
/// roles are those of row_gemm/kernel.cuh; both operands are read as they lie in memory, rows of
/// the contraction with contiguous columns, and turned by ldmatrix.
namespace moegemm::cuda::sm80 {

/// What run_tiles asks.
template <typename Traits>
struct WeightPipeline {
  using Shape = typename Traits::Shape;
  using Tile = WeightTile;
  const WeightGemmParams& params;
  const ExpertTable& experts;
  const WeightTile* tiles;
  RowTable<Traits>* rows;
  float* scales;  ///< [stages][depth]

  __device__ __forceinline__ auto loader() const {
    if constexpr (Shape::kLoadWarps > 0) {
      return WeightStreamLoader<Traits>(params, scales);
    } else {
      return WeightLoader<Traits>(params, tiles, *rows, scales);
    }
  }
  __device__ __forceinline__ WeightScheduler<Shape> scheduler() const { return {params, experts}; }
  static __device__ __forceinline__ void start() {}
  template <typename Feed>
  __device__ __forceinline__ void compute(const WeightTile& tile, int, Feed& feed) const {
    Accumulators<Traits> acc;
    clear<Traits>(acc);
    multiply_rows<Traits>(params, tile, feed, acc);
    store_weights<Traits>(params, tile, acc);
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::Shape::kThreads, Traits::Shape::kBlocksPerMultiprocessor)
    weight_gemm_kernel(const __grid_constant__ WeightGemmParams params) {
  using Shape = typename Traits::Shape;
  using Layout = WeightGemmLayout<Shape, Traits::kElementBytes>;
  extern __shared__ __align__(kStageAlignment) std::byte shared[];
  auto* tiles = reinterpret_cast<WeightTile*>(shared + Layout::kTiles);
  const ExpertTable experts = {
      reinterpret_cast<int*>(shared + Layout::kRowPrefix),
      reinterpret_cast<unsigned short*>(shared + Layout::order(params.experts))};
  if (threadIdx.x < kWarpSize) {
    experts.build(params, Traits::kDepth,
                  *reinterpret_cast<int(*)[kSizeClasses]>(shared + Layout::kCounts));
  }
  auto* scales = reinterpret_cast<float*>(shared + Layout::kScales);
  auto* ring = reinterpret_cast<StageRing<Shape>*>(shared + Layout::kRing);
  auto* rows = reinterpret_cast<RowTable<Traits>*>(shared + Layout::kRowTable);
  prepare_ring(*ring);
  __syncthreads();
  run_tiles<Traits>(WeightPipeline<Traits>{params, experts, tiles, rows, scales}, shared, tiles,
                    *ring, scales);
}

template <WeightGemm Kernel, DType D>
KernelFunctions weight_gemm_functions() {
  using Traits = GemmTraits<ShapeOf<Kernel>, ElementType<D>, Kernel.math, Major::kOuter,
                            Major::kOuter, Kernel.loads>;
  return {.plain = reinterpret_cast<const void*>(&weight_gemm_kernel<Traits>)};
}

}  // namespace moegemm::cuda::sm80
