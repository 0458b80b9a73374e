#pragma once

#include <cstdint>

#include "cuda/device/size_class.h"
#include "cuda/sm80/tile/block_shape.h"

/// What lies where in dynamic shared memory, in bytes. What has a size known only at run time comes
/// last.
namespace moegemm::cuda::sm80 {

constexpr int kTileBytes = 32;    ///< of a decoded tile in the ring
constexpr int kTargetSlots = 8;   ///< tiles whose results' places are known: stages + 2 are needed
constexpr int kNamedWords = 256;  ///< of UnnamedRows

/// Barriers of the stages, of kernels with a warp that copies.
template <typename Shape>
constexpr int kRingBytes = Shape::kLoadWarps > 0 ? Shape::kStages * 8 : 0;

/// Forward and dX.
template <typename Shape>
struct RowGemmLayout {
  static constexpr int kTiles = Shape::kStages * Shape::kStageBytes;
  static constexpr int kRing = kTiles + kTileSlots * kTileBytes;  ///< StageRing
  static constexpr int kTargets = kRing + kRingBytes<Shape>;      ///< RowTarget [slots][rows]
  static constexpr int kNamedRows =
      kTargets + (Shape::kLoadWarps > 0 ? kTargetSlots * Shape::kRows * 8 : 0);
  static constexpr int kStarts = kNamedRows + kNamedWords * 4;  ///< SegmentStart [E + 1]
  static constexpr std::int64_t total(std::int64_t experts) { return kStarts + (experts + 1) * 8; }
};

/// dW.
template <typename Shape, int ElementBytes>
struct WeightGemmLayout {
  static constexpr int kTiles = Shape::kStages * Shape::kStageBytes;
  static constexpr int kDepth = Shape::template depth<ElementBytes>();
  static constexpr int kRing = kTiles + kTileSlots * kTileBytes;  ///< StageRing
  static constexpr int kRowTable = kRing + kRingBytes<Shape>;     ///< RowOffsets [2][depth]
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

}  // namespace moegemm::cuda::sm80
