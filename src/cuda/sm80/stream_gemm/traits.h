#pragma once

#include <cstdint>

#include "cuda/backend/instance.h"
#include "cuda/device/host_device.h"
#include "cuda/device/warp.h"
#include "moegemm/kinds.h"
#include "moegemm/quantization.h"

/// The static shape of the kernels that stream quantised weights past few rows, and what lies where
/// in their shared memory.
namespace moegemm::cuda::sm80 {

/// A line of instances/sm80.inc.
struct StreamGemm {
  int arch = 80;       ///< compute capability times ten
  bool exact = false;  ///< and for no newer one
  Op op = Op::kForward;
  WeightFormat weights = WeightFormat::kPlain;
  int warps = 16;
  int stages = 3;  ///< of each warp's ring: one is read, two are on their way
};

constexpr int kStreamFeatures = 16;   ///< of a tile: mma.sync's M
constexpr int kStreamRowBytes = 128;  ///< of each row of W in a stage
constexpr int kStreamStageBytes = kStreamFeatures * kStreamRowBytes;
/// mxfp4 and int4 have many scales: they are loaded for four stages at once, of which lane t of a
/// quad loads stage t, so that whole sectors are used.
constexpr int kBlockStages = 4;
constexpr int kStepDepth = 32;         ///< of a step: two k16 groups
constexpr int kMostStreamRows = 32;    ///< that a block holds at once, and of a tile
constexpr int kLeastStreamRows = 4;    ///< that a block must have room for
constexpr int kStreamScanWarps = 4;    ///< of scan_segments
constexpr int kStreamNamedWords = 64;  ///< of UnnamedRows

template <StreamGemm Kernel>
struct StreamTraits {
  static constexpr StreamGemm kKernel = Kernel;
  static constexpr WeightFormat kFormat = Kernel.weights;
  static constexpr bool kNibbles = kFormat != WeightFormat::kFp8;
  static constexpr int kWarps = Kernel.warps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kStages = Kernel.stages;
  static constexpr int kStageDepth = kStreamRowBytes * (kNibbles ? 2 : 1);
  static constexpr int kStageSteps = kStageDepth / kStepDepth;
  static constexpr int kStepBytes = kStreamRowBytes / kStageSteps;  ///< of a row of W
  /// What each warp's decoder keeps: see decode.cuh.
  static constexpr int kTableBytes = kFormat == WeightFormat::kFp8 ? 0 : 2048;
  static constexpr int kRows = kWarps <= 16 ? 32 : 16;  ///< of a tile, at most: registers
  static_assert(kStages == 3 && kWarps >= kStreamScanWarps);
};

/// Tiles of one expert that are multiplied with the same rows.
struct StreamPhase {
  int tile_end;  ///< one past its last tile
  int expert;
  int row;   ///< its first, in expert order over the whole buffer
  int rows;  ///< 1 to kMostStreamRows
  int slot;  ///< where the first one is among the rows that the block holds
};

/// What a block does between two barriers.
struct StreamBatch {
  int phases;
  int rows;      ///< of all phases
  int tile_end;  ///< one past the last tile
};

/// Where a row's results go, and their factor.
struct StreamTarget {
  int row;      ///< negative: nowhere
  float scale;  ///< set if results are multiplied
};

/// Byte offsets into dynamic shared memory. The rows come last.
template <typename Traits>
struct StreamLayout {
  static constexpr int kTables = Traits::kWarps * Traits::kStages * kStreamStageBytes;
  static constexpr int kPhases = kTables + Traits::kWarps * Traits::kTableBytes;
  static constexpr int kBatch = kPhases + kMostStreamRows * sizeof(StreamPhase);
  static constexpr int kTargets = kBatch + 16;
  static constexpr int kNamedRows = kTargets + kMostStreamRows * sizeof(StreamTarget);
  static constexpr int kScan = kNamedRows + kStreamNamedWords * 4;
  static constexpr int kStarts = kScan + kStreamScanWarps * 8;  ///< SegmentStart [E + 1]
  static constexpr std::int64_t rows(std::int64_t experts) {
    return (kStarts + (experts + 1) * 8 + 127) / 128 * 128;
  }
};

/// Bytes from one row to the next: two rows that are read at once are in different banks.
constexpr std::int64_t stream_row_pitch(std::int64_t depth) {
  const std::int64_t units = (depth + kStepDepth - 1) / kStepDepth;  // of 64 bytes
  return (units % 2 == 0 ? units + 1 : units) * 64;
}

/// Defined in kernel.cuh, instantiated in the translation unit of the line.
template <StreamGemm Kernel, DType D>
KernelFunctions stream_gemm_functions();

}  // namespace moegemm::cuda::sm80
