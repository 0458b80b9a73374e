#pragma once

#include "cuda/backend/instance.h"
#include "cuda/device/host_device.h"
#include "cuda/device/warp.h"
#include "moegemm/kinds.h"

/// The static tile of the mma.sync kernels, as host-device maths. A thread block multiplies A
/// [rows, depth] with B [depth, cols]; extents along the contraction are in bytes, so that one
/// shape serves 16-bit and 32-bit elements.
namespace moegemm::cuda::sm80 {

/// Which direction of an operand is contiguous, in device memory and in shared memory.
enum class Major {
  kDepth,  ///< the contraction
  kOuter,  ///< the rows of A or the columns of B
};

/// How products are computed.
enum class Math {
  kTensor16,  ///< bf16 or fp16 tensor cores
  kTf32,      ///< fp32 rounded to TF32, on tensor cores
  kFloat,     ///< fp32 multiply-adds: IEEE, in the order of the contraction
};

/// How operands reach shared memory.
enum class Loads {
  kVectors,   ///< 16 bytes at a time: base, pitch and extents are multiples of 16 bytes
  kElements,  ///< element by element: any alignment
};

constexpr int kChunkBytes = 16;
constexpr int kStageAlignment = 256;
constexpr int kTileSlots = 16;  ///< decoded tiles in the ring: stages + 3 are needed
constexpr int kTileBytes = 32;  ///< of each

/// A line of instances/sm80.inc.
struct Gemm {
  int arch = 80;       ///< compute capability times ten
  bool exact = false;  ///< not for newer GPUs: setmaxnreg
  Op op;
  Math math = Math::kTensor16;
  Loads loads = Loads::kVectors;
  int rows;  ///< of a tile
  int cols;
  int depth_bytes;  ///< of one row of A in a stage
  int stages;
  int warp_rows;  ///< warps along the rows
  int warp_cols;
  int blocks;  ///< on a multiprocessor, at most
  int height_step = 1;
  int load_warps = 0;
  bool quantised = false;  ///< decodes W from every packed format
  bool any_bank = false;   ///< exact fp32 forward: fma.cuh

  constexpr int element_bytes() const { return math == Math::kTensor16 ? 2 : 4; }
  constexpr int depth() const { return depth_bytes / element_bytes(); }
};

template <int Rows_, int Cols_, int DepthBytes_, int Stages_, int WarpRows_, int WarpCols_,
          int BlocksPerMultiprocessor_, int HeightStep_ = 1, int LoadWarps_ = 0>
struct BlockShape {
  static constexpr int kRows = Rows_;
  static constexpr int kCols = Cols_;
  static constexpr int kDepthBytes = DepthBytes_;  ///< of one row of A in a stage
  static constexpr int kStages = Stages_;
  static constexpr int kWarpRows = WarpRows_;  ///< warps along the rows
  static constexpr int kWarpCols = WarpCols_;
  static constexpr int kBlocksPerMultiprocessor = BlocksPerMultiprocessor_;

  static constexpr int kWarps = kWarpRows * kWarpCols;  ///< that multiply
  /// Warps that do nothing but copy; without any, all warps copy as well.
  static constexpr int kLoadWarps = LoadWarps_;
  static constexpr int kThreads = (kWarps + kLoadWarps) * kWarpSize;
  static constexpr int kCopyThreads = kLoadWarps > 0 ? kLoadWarps* kWarpSize : kThreads;
  static constexpr int kFirstCopyThread = kThreads - kCopyThreads;
  static constexpr int kRowBlocks = kRows / 16 / kWarpRows;  ///< m16 blocks of one warp
  static constexpr int kColBlocks = kCols / 8 / kWarpCols;   ///< n8 blocks of one warp
  /// A tile with fewer rows skips whole row blocks of every warp, this many at a time: each height
  /// is a main loop of its own.
  static constexpr int kHeightStep = HeightStep_;
  static constexpr int kGranule = 16 * kWarpRows * kHeightStep;  ///< rows per height step

  static constexpr int kRowsBytes = kRows * kDepthBytes;
  static constexpr int kStageBytes = (kRows + kCols) * kDepthBytes;

  template <int ElementBytes>
  static constexpr int depth() {
    return kDepthBytes / ElementBytes;
  }

  static_assert(kRows % (16 * kWarpRows) == 0 && kRowBlocks % kHeightStep == 0);
  static_assert(kCols % (32 * kWarpCols) == 0, "the store turns four n8 blocks at a time");
  static_assert(kDepthBytes == 64 || kDepthBytes == 128);
  static_assert(kStages >= 3 && kStages + 3 <= kTileSlots);
  static_assert(kLoadWarps == 0 || (kLoadWarps == 4 && kWarps == 8), "registers: pipeline.cuh");
  static_assert(kRowBlocks * kColBlocks * 4 <= 128, "more accumulators than registers allow");
};

template <Gemm Kernel>
using ShapeOf =
    BlockShape<Kernel.rows, Kernel.cols, Kernel.depth_bytes, Kernel.stages, Kernel.warp_rows,
               Kernel.warp_cols, Kernel.blocks, Kernel.height_step, Kernel.load_warps>;

/// Dynamic shared memory begins with the stages, the decoded tiles and, in kernels with warps that
/// only copy, the barriers of the stages. Offsets in bytes; what has a size known only at run time
/// comes last.
template <typename Shape>
struct PipelineLayout {
  static constexpr int kTiles = Shape::kStages * Shape::kStageBytes;
  static constexpr int kRing = kTiles + kTileSlots * kTileBytes;  ///< StageRing
  static constexpr int kEnd = kRing + (Shape::kLoadWarps > 0 ? Shape::kStages * 8 : 0);
};

/// Everything that changes the inner loop of a kernel.
template <typename Shape_, typename Element_, Math Math_, Major AMajor_, Major BMajor_,
          Loads Loads_, bool Quantised_ = false, bool AnyBank_ = false>
struct GemmTraits {
  using Shape = Shape_;
  using Element = Element_;
  static constexpr Math kMath = Math_;
  static constexpr Major kAMajor = AMajor_;
  static constexpr Major kBMajor = BMajor_;
  static constexpr Loads kLoads = Loads_;
  static constexpr bool kQuantised = Quantised_;  ///< B comes packed
  static constexpr bool kAnyBank = AnyBank_;      ///< fma.cuh
  static constexpr int kElementBytes = sizeof(Element);
  static constexpr int kDepth = Shape::template depth<kElementBytes>();  ///< of one stage
  static constexpr int kChunkElements = kChunkBytes / kElementBytes;
  static constexpr int kABytes = Shape::kRows * kElementBytes;  ///< of one depth, outer major
  static constexpr int kBBytes = Shape::kCols * kElementBytes;
  /// Stages hold B's columns in the order of placed_column. Where they are contiguous, chunks of
  /// eight columns cannot be taken apart.
  static constexpr bool kPlacedColumns = kElementBytes == 2 && kBMajor == Major::kDepth;
  static_assert((kMath == Math::kTensor16) == (kElementBytes == 2));
  static_assert(!kAnyBank || (kMath == Math::kFloat && kBMajor == Major::kDepth));
};

/// The accumulators of one thread: [row block][column block], as mma.sync lays them out.
template <typename Traits>
using Accumulators = float[Traits::Shape::kRowBlocks][Traits::Shape::kColBlocks][4];

}  // namespace moegemm::cuda::sm80
