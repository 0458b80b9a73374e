#pragma once

#include <cstdint>

#include "cuda/device/host_device.h"
#include "cuda/device/schedule/size_class.h"
#include "cuda/device/schedule/weight_tiles.h"
#include "cuda/sm80/tile/traits.h"

/// The static tile of the dW kernels, and what lies where in their shared memory.
namespace moegemm::cuda::sm80 {

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
