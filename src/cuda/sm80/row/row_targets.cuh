#pragma once

#include "cuda/sm80/row/row_gemm_load.cuh"
#include "cuda/sm80/tile/fragments.cuh"
#include "cuda/sm80/tile/router_weight.cuh"
#include "cuda/sm80/tile/shared_layout.h"

/// Where the results of a row GEMM go.
namespace moegemm::cuda::sm80 {

/// The flat row that row `local` of the tile stands for, if somebody asks for it; -1 if there is
/// none.
__device__ __forceinline__ int flat_row_of(const RowGemmParams& params, const RowTile& tile,
                                           int local) {
  const bool indexed = params.scatter || params.multiply;
  return indexed && local < tile.rows
             ? flat_row(params.gather_indices, tile.row + local, params.flat_rows)
             : -1;
}

struct RowTarget {
  int row;      ///< of the output, negative for none
  float scale;  ///< of the results, if they are multiplied

  __device__ __forceinline__ void set_row(const RowGemmParams& params, const RowTile& tile,
                                          int local, int flat) {
    row = params.scatter ? flat : (local < tile.rows ? tile.row + local : -1);
  }
  template <typename Element>
  __device__ __forceinline__ void set_scale(const RowGemmParams& params, int flat) {
    scale = flat < 0 ? 1.0f
                     : router_weight<Element>(params.topk_weights, params.weights_are_fp32, flat);
  }
};

/// Targets of one thread: half h of row block i at 2 i + h.
template <typename Traits>
class RowTargets {
  using Shape = typename Traits::Shape;
  static constexpr int kHalves = 2 * Shape::kRowBlocks;

 public:
  int rows[kHalves];
  float scales[kHalves];  ///< set if results are multiplied

  /// By indices in device memory.
  __device__ __forceinline__ void locate(const RowGemmParams& params, const RowTile& tile,
                                         int row_blocks) {
    int flat[kHalves];  // all loads in flight before the first use
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      // Past the tile's height: none.
      const int local = i < 2 * row_blocks ? first(row_blocks) + i * 8 : Shape::kRows;
      flat[i] = flat_row_of(params, tile, local);
      RowTarget target;
      target.set_row(params, tile, local, flat[i]);
      rows[i] = target.row;
    }
    if (!params.multiply) return;
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      RowTarget target;
      target.template set_scale<typename Traits::Element>(params, flat[i]);
      scales[i] = target.scale;
    }
  }

  /// As the warps that copy have found them, for each row of the tile.
  __device__ __forceinline__ void read(const RowTarget* targets, int row_blocks) {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      const int local = i < 2 * row_blocks ? first(row_blocks) + i * 8 : 0;
      rows[i] = targets[local].row;
      scales[i] = targets[local].scale;
    }
  }

  __device__ __forceinline__ void scale(Accumulators<Traits>& acc) const {
#pragma unroll
    for (int i = 0; i < Shape::kRowBlocks; ++i) {
#pragma unroll
      for (auto& block : acc[i]) {
#pragma unroll
        for (int h = 0; h < 4; ++h) block[h] *= scales[2 * i + h / 2];
      }
    }
  }

 private:
  static __device__ __forceinline__ int first(int row_blocks) {
    return warp_row<Shape>(row_blocks) + lane_id() / 4;
  }
};

/// The loader of warps that only copy: finds the targets of a tile's rows, too, while the tile
/// before is multiplied. At a tile's end their two dependent loads would hold up every warp.
template <typename Traits>
class RowStreamLoader : public RowLoader<Traits> {
  using Shape = typename Traits::Shape;

 public:
  __device__ __forceinline__ RowStreamLoader(const RowGemmParams& params, RowTarget* targets)
      : RowLoader<Traits>(params), params_(params), targets_(targets) {}

  /// The ring's slot of the tile with this number.
  static __device__ __forceinline__ int slot_of(int number) {
    return number % kTargetSlots * Shape::kRows;
  }

  __device__ __forceinline__ int start(const RowTile& tile) {
#pragma unroll 1
    for (int local = static_cast<int>(threadIdx.x) - Shape::kFirstCopyThread; local < Shape::kRows;
         local += Shape::kCopyThreads) {
      const int flat = flat_row_of(params_, tile, local);
      RowTarget target = {};
      target.set_row(params_, tile, local, flat);
      if (params_.multiply) target.template set_scale<typename Traits::Element>(params_, flat);
      targets_[slot_of(number_) + local] = target;
    }
    ++number_;
    return RowLoader<Traits>::start(tile);
  }

 private:
  const RowGemmParams& params_;
  RowTarget* targets_;
  int number_ = 0;  ///< of the next tile
};

}  // namespace moegemm::cuda::sm80
