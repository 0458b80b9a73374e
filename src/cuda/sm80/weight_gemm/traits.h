#pragma once

#include <cstdint>

#include "cuda/device/host_device.h"
#include "cuda/device/size_class.h"
#include "cuda/device/tile_split.h"
#include "cuda/sm80/tile/traits.h"

/// How dW = dY^T X, [N, K] of each expert whatever its rows, is cut into tiles.
namespace moegemm::cuda::sm80 {

struct WeightTiling {
  int n_tiles = 0;
  int k_tiles = 0;
  bool k_fastest = true;  ///< consecutive tiles differ in their columns of X

  MOEGEMM_HOST_DEVICE int per_expert() const { return n_tiles * k_tiles; }
};

/// One output tile, as warp 0 hands it to the others.
struct WeightTile {
  int expert = -1;  ///< negative: no more work
  int row = 0;      ///< first row of the expert's segment
  int rows = 0;
  int n = 0;  ///< first column of dY
  int k = 0;  ///< first column of X

  MOEGEMM_HOST_DEVICE bool is_end() const { return expert < 0; }
};

/// Expert (by position in the order of work) and columns of tile `number`; the caller fills in the
/// rows.
MOEGEMM_HOST_DEVICE WeightTile decode_weight_tile(int number, const WeightTiling& tiling,
                                                  int n_tile, int k_tile) {
  const int expert = number / tiling.per_expert();
  const int local = number - expert * tiling.per_expert();
  const int fastest = tiling.k_fastest ? tiling.k_tiles : tiling.n_tiles;
  const int slow = local / fastest;
  const int fast = local - slow * fastest;
  return {expert, 0, 0, (tiling.k_fastest ? slow : fast) * n_tile,
          (tiling.k_fastest ? fast : slow) * k_tile};
}

/// Byte offsets into dynamic shared memory.
template <typename Shape, int ElementBytes>
struct WeightGemmLayout : PipelineLayout<Shape> {
  static constexpr int kDepth = Shape::template depth<ElementBytes>();
  static constexpr int kRowTable = PipelineLayout<Shape>::kEnd;  ///< RowOffsets [2][depth]
  static constexpr int kScales =
      kRowTable + (Shape::kLoadWarps > 0 ? 0 : 2 * kDepth * 16);  ///< float [stages][depth]
  static constexpr int kCounts = kScales + Shape::kStages * kDepth * 4;
  static constexpr int kRowPrefix = kCounts + kSizeClasses * 4;  ///< int [E + 1]
  template <typename Int>
  static MOEGEMM_HOST_DEVICE constexpr Int order(Int experts) {  ///< unsigned short [E]
    return kRowPrefix + (experts + 1) * 4;
  }
  static constexpr std::int64_t total(std::int64_t experts) { return order(experts) + experts * 2; }
};

using WeightGemm = Gemm;

/// Defined in kernel.cuh, instantiated in the translation unit of the line.
template <WeightGemm Kernel, DType D>
KernelFunctions weight_gemm_functions();

}  // namespace moegemm::cuda::sm80
