#pragma once

#include <cstdint>

#include "cuda/device/schedule/tile_split.h"
#include "cuda/sm80/tile/traits.h"

/// The static tile of the row GEMMs, and what lies where in their shared memory.
namespace moegemm::cuda::sm80 {

constexpr int kTargetSlots = 8;  ///< tiles whose results' places are known: stages + 2 are needed
constexpr int kScanWarps = 4;    ///< of scan_segments; every kernel has as many

/// Byte offsets into dynamic shared memory.
template <typename Shape>
struct RowGemmLayout : PipelineLayout<Shape> {
  static constexpr int kTargets = PipelineLayout<Shape>::kEnd;  ///< RowTarget [slots][rows]
  static constexpr int kNamedRows =
      kTargets + (Shape::kLoadWarps > 0 ? kTargetSlots * Shape::kRows * 8 : 0);
  /// Of UnnamedRows. The smallest tiles have few rows, and a fourth block fits without the others.
  static constexpr int kNamedWords = Shape::kRows <= 16 ? 64 : 256;
  static constexpr int kScan = kNamedRows + kNamedWords * 4;  ///< scratch of scan_segments
  static constexpr int kStarts = kScan + kScanWarps * 8;      ///< SegmentStart [E + 1]
  static constexpr std::int64_t total(std::int64_t experts) { return kStarts + (experts + 1) * 8; }
};

using RowGemm = Gemm;

/// Defined in kernel.cuh, instantiated in the translation unit of the line.
template <RowGemm Kernel, DType D>
KernelFunctions row_gemm_functions();

}  // namespace moegemm::cuda::sm80
