#pragma once

#include <cstdint>

#include "cuda/backend/instance.h"
#include "cuda/device/element.cuh"
#include "cuda/device/host_device.h"
#include "cuda/sm90/warpgroups.h"
#include "moegemm/kinds.h"
#include "moegemm/quantization.h"

/// Shapes and shared-memory layout of the row GEMMs (forward and dX), as host-device maths.
///
/// Weights lie on wgmma's M side ("features": output columns), the rows of a segment on its N side,
/// so a tile takes any multiple of `granule` rows and an uneven expert wastes little.
namespace moegemm::cuda::sm90 {

enum class Schedule {
  kCooperative,  ///< both consumer warpgroups share a tile, half of its features each
  kPingpong,     ///< each has its own tile; one multiplies while the other stores
};

/// How the rows of a tile reach shared memory: which variants of a kernel are compiled.
enum class RowLoads { kInOrder, kGathered, kBoth };

constexpr int kDepth = 64;      ///< contraction step: 64 16-bit elements are a swizzled row
constexpr int kTf32Depth = 32;  ///< the same of fp32
constexpr int kRowBytes = 128;  ///< bytes of such a row
constexpr int kOtherWarps = 3;  ///< producer warps beside the scheduler
constexpr int kTileSlots =
    4;  ///< decoded tiles in flight: two being multiplied or stored, two ahead
constexpr int kMaxBoxes = 9;     ///< heights of a kernel's boxes of rows
constexpr int kStagedRows = 32;  ///< rows per store buffer: 4 KiB, half of a warpgroup's two
constexpr int kPairTableBytes = 256 * 16 * 8;  ///< a pair of fp32 for each byte, sixteen times
constexpr int kExcessBytes = 512;              ///< of mxfp4 scales that take two products
constexpr int kExcessFlagBytes = 16;
constexpr int kRingBytes = 512;  ///< all barriers: 2 x 26 stages at most, 3 x kTileSlots

/// A line of instances/sm90.inc.
struct RowGemm {
  int arch = 90;
  bool exact = true;  ///< wgmma is in sm_90a alone
  Op op;
  int features;  ///< of a tile
  int rows;      ///< of a tile, at most
  int granule;
  int stages;
  Schedule schedule;
  RowLoads loads;
  bool activated = false;  ///< the tile stores what its activation leaves: see activate.cuh
  WeightFormat weights = WeightFormat::kPlain;  ///< else they are decoded: see ../quantised_gemm
  bool tf32 = false;                            ///< of fp32, multiplied as TF32: see ../tf32_gemm

  constexpr bool pingpong() const { return schedule == Schedule::kPingpong; }
  constexpr bool quantised() const { return weights != WeightFormat::kPlain; }
  /// Of a weight in shared memory.
  constexpr int weight_bits() const {
    return quantised() ? Quantization{.format = weights}.bits() : (tf32 ? 32 : 16);
  }
  /// Elements of a swizzled row of 128 bytes.
  constexpr int panel_depth() const { return tf32 ? kTf32Depth : kDepth; }
  /// A tile of few rows streams weights, for microseconds: what a block does once counts.
  constexpr bool streams() const { return rows <= 64; }
  /// 64-wide panels of the contraction in a stage. Packed weights are streamed in rows of 128
  /// bytes: with 32 decode takes 14 % longer.
  constexpr int panels() const {
    return quantised() && streams() && op == Op::kForward ? 16 / weight_bits() : 1;
  }
  /// Fewest wgmma columns: below 64 an instruction hardly gets faster, and each N is compiled.
  /// Weights in registers: nine N, eight of fp8, four of TF32; more and ptxas does not find the
  /// registers (see ../quantised_gemm/mma.cuh).
  constexpr int least_columns() const {
    if (tf32 && op == Op::kDx && !streams()) return rows - 3 * granule;
    if (quantised() && rows > 128) return rows - (weight_bits() == 8 ? 7 : 8) * granule;
    if (quantised() && !streams()) return granule;
    return rows > 64 ? 64 : granule;
  }
  /// m64 blocks of one warpgroup.
  constexpr int blocks() const { return features / 64 / (pingpong() ? 1 : kConsumers); }
  constexpr int accumulators() const { return blocks() * rows / 2; }

  /// A tile's rows come in one TMA box: several would cost the copy engine tens of cycles each
  /// (Qwen3-30B fwd2 on an H200, TFLOP/s: one box 602, boxes of 64 rows 592, of 32 rows 497, of 16
  /// rows 437). It is as high as the columns that are multiplied, since what lies past them comes
  /// through L2 in vain: with full and half height only, Llama-4 Scout's fwd2 took 5 % longer and
  /// its dx1 8 %. Streaming tiles load few rows beside their weights; each height is one more map
  /// to encode.
  constexpr int least_box() const { return streams() ? rows / 2 : least_columns(); }
  constexpr int box_step() const { return streams() ? rows / 2 : granule; }
  constexpr int boxes() const { return (rows - least_box()) / box_step() + 1; }
  constexpr int box_rows(int box) const { return least_box() + box * box_step(); }

  /// Whether a plain tile adds a bias to its fp32 results where there is one. Not with the 192
  /// accumulators of a pingpong tile: code that is only jumped over cost products of short depth up
  /// to 3 % (Qwen3-Next fwd2), and the gathered 128x192 spills 12 bytes. For rows in order there is
  /// a function more instead (KernelFunctions::biased).
  constexpr bool adds_bias() const { return !pingpong() || accumulators() <= 64; }
};

/// Everything that changes the inner loop of a kernel.
template <RowGemm Kernel_, DType D, bool Gathered_, bool Biased = false>
struct RowGemmTraits {
  static constexpr RowGemm kKernel = Kernel_;
  using Element = ElementType<D>;
  /// W_e is [N, K]: its rows are K-contiguous, which is the contraction in forward and the output
  /// columns in dX.
  static constexpr bool kDepthMajor = kKernel.op == Op::kForward;
  static constexpr bool kGathered = Gathered_;
  static constexpr int kFeatures = kKernel.features;
  static constexpr int kRows = kKernel.rows;
  static constexpr int kGranule = kKernel.granule;
  static constexpr int kStages = kKernel.stages;
  static constexpr bool kPingpong = kKernel.pingpong();
  static constexpr bool kActivated = kKernel.activated;
  static constexpr bool kStreams = kKernel.streams();
  static constexpr bool kAddsBias = Biased || kKernel.adds_bias();
  static constexpr int kMinColumns = kKernel.least_columns();
  static constexpr int kBlocks = kKernel.blocks();
  /// Features from a warpgroup's block to its next. An activated panel has two halves, gates and
  /// their ups, and a warpgroup has a block of each.
  static constexpr int kBlockStep = kActivated ? kFeatures / 2 : 64;
  /// Features from the first of a warpgroup to the first of the other.
  static constexpr int kConsumerStep = kPingpong ? 0 : (kActivated ? 64 : kBlocks * 64);
  static constexpr int kBoxes = kKernel.boxes();
  /// Which box a tile of so many rows needs.
  static MOEGEMM_HOST_DEVICE constexpr int box_of(int rows) {
    constexpr int kLeast = kKernel.least_box();
    constexpr int kStep = kKernel.box_step();
    return rows <= kLeast ? 0 : (rows - kLeast + kStep - 1) / kStep;
  }
  static MOEGEMM_HOST_DEVICE constexpr int box_rows(int box) {
    constexpr int kLeast = kKernel.least_box();
    constexpr int kStep = kKernel.box_step();
    return kLeast + box * kStep;
  }
  static constexpr bool kQuantised = kKernel.quantised();
  static constexpr bool kTf32 = kKernel.tf32;
  static constexpr int kPanels = kKernel.panels();
  static constexpr int kPanelDepth = kKernel.panel_depth();
  static constexpr int kStageDepth = kPanelDepth * kPanels;
  static constexpr int kWeightBytes = kFeatures * kStageDepth * kKernel.weight_bits() / 8;
  /// Depth of a stage of the low-rank part: its weights are plain, and where the others are not, a
  /// stage has no room for 64.
  static constexpr int kLowDepth = kQuantised ? 16 : kPanelDepth;
  /// dX decodes neighbouring features: those of a thread are a pair.
  static constexpr bool kFeaturePairs = kQuantised && !kDepthMajor;
  /// Which of 64 features is row lane / 4 + 8 * half of a warp's m16 block.
  static MOEGEMM_HOST_DEVICE constexpr int feature_of(int warp, int lane, int half) {
    if (!kFeaturePairs) return warp * 16 + lane / 4 + half * 8;
    if (kKernel.weight_bits() == 8) return warp * 16 + lane / 4 * 2 + half;
    return warp / 2 * 32 + lane / 4 * 4 + warp % 2 * 2 + half;
  }
  /// From one to the other.
  static constexpr int kHalfStep = kFeaturePairs ? 1 : 8;
  /// Whether scales come with a stage: producer warps write a table of what its weights are
  /// multiplied by (../quantised_gemm/scales.cuh).
  static constexpr bool kTabled = kQuantised && !kStreams;
  static constexpr int kScaleWarps = kTabled && !kGathered ? 2 : 0;  ///< that do nothing else
  static constexpr int kInfoWarps = kOtherWarps - kScaleWarps;       ///< for rows in order
  /// Of the stage's 256 groups of 32 weights. nf4 forward has sixteen products for 64 weights of a
  /// row instead.
  static constexpr int kFactorBytes =
      kDepthMajor ? (kKernel.weights == WeightFormat::kNf4 ? 128 * 32 : 1024)
      : kKernel.weights == WeightFormat::kMxfp4 || kKernel.weights == WeightFormat::kInt4 ? 512
                                                                                          : 1024;
  static constexpr int kTableBytes =
      !kTabled
          ? 0
          : kFactorBytes +
                (kKernel.weights == WeightFormat::kMxfp4 ? kExcessBytes + kExcessFlagBytes : 0);
  /// Whether nf4 looks its values up in shared memory.
  static constexpr bool kPairTable =
      kKernel.weights == WeightFormat::kNf4 && !(kTabled && kDepthMajor);
  static constexpr int kDecodeBytes = (kPairTable ? kPairTableBytes : 0) + kStages * kTableBytes;
  /// Of the pool of 3 x 168 registers per thread triple. A producer that gathers keeps a pointer
  /// for each of its rows, one that writes scales the next stages', one that rounds its rows to
  /// TF32 a stage of them. Consumers of such tiles need no more than 200.
  static constexpr int kProducerRegisters =
      kTf32 && kGathered ? 104 : (kTabled ? 88 : (kGathered ? 56 : 40));
  static constexpr int kConsumerRegisters = (3 * 168 - kProducerRegisters) / 2;
  static constexpr int kRowsBytes = kRows * kRowBytes;  ///< of a panel
  static constexpr int kStageBytes = kWeightBytes + kPanels * kRowsBytes;
  /// Whether results in order leave by TMA while the next tile is multiplied: see store_later.
  static constexpr bool kStoresLater = kTabled;
  /// Rows of a warpgroup's staging buffer: then as many as there is room for, with 1024 experts
  /// that lie anywhere.
  static constexpr int staging_rows() {
    if (kTf32) return 0;  // fp32 results are stored from registers
    // Two buffers, but results of one step need one.
    if (!kStoresLater) return kRows * kBlocks <= 16 ? 16 : 2 * kStagedRows;
    const int left = kSharedMemoryLimit - kStages * kStageBytes - kDecodeBytes - kRingBytes -
                     kTileSlots * 16 - 1024 * 12 - 16;
    const int most = left / (kConsumers * kRowBytes) / kStagedRows * kStagedRows;
    return most < kRows ? most : kRows;
  }
  static constexpr int kStagingRows = staging_rows();
  static constexpr int kStagingBytes = kConsumers * kStagingRows * kRowBytes;
  /// Where row info lies in it: what needs row info has no other use for the end of the buffer.
  static constexpr int kInfoInStaging = 2 * kStagedRows * kRowBytes;
  static_assert(!kStoresLater ||
                kInfoInStaging + kTileSlots * kRows * 8 <= kStagingRows * kRowBytes);

  /// Whether one copy of the stores serves every N. The first tile of a launch waits for its code,
  /// which comes from memory, and with 192 accumulators each copy is 60 KB: on an H200 16 instead
  /// of 6 microseconds for the first store of Qwen3-30B fwd2, and products of short depth are up to
  /// 11 % faster with one copy (Qwen3-Next fwd2). Cooperative tiles are up to 2 % slower, and with
  /// three blocks the registers of all N do not come together without spills.
  static constexpr bool kCommonStores =
      !kTf32 &&
      (kActivated || (kPingpong && kBlocks == 2 && !kStreams) || (kQuantised && !kStreams));

  static_assert(kFeatures % (kPingpong ? 64 : 128) == 0);
  static_assert(kRows % kGranule == 0 && kRows <= 256);
  static_assert(kKernel.least_box() % 8 == 0 &&
                (kRows - kKernel.least_box()) % kKernel.box_step() == 0 && kBoxes <= kMaxBoxes);
  static_assert(!kActivated || kBlocks == 2 || (kBlocks == 1 && kPingpong),
                "a block of gates and a block of ups, or one of both");
  static_assert(kKernel.accumulators() <= 192,
                "more accumulators than a consumer thread has registers");
  static_assert(kTf32 == (sizeof(Element) == 4));
};

constexpr int kFewStages = 10;      ///< activated tiles of so many have smaller rings:
constexpr int kFewRingBytes = 256;  ///< every byte counts there
/// Of UnnamedRows: what a tile leaves of shared memory, within these bounds.
constexpr int kLeastNamedWords = 64;
constexpr int kMostNamedWords = 1024;
constexpr int kBiasBytes = 256;  ///< biases of a warpgroup's features in an activated tile

/// Byte offsets into dynamic shared memory. What has a size known only at run time comes last, so
/// that the main loops spend no registers on addresses.
template <typename Traits>
struct RowGemmLayout {
  static constexpr int kStaging = Traits::kStages * Traits::kStageBytes;
  static constexpr int kDecode = kStaging + Traits::kStagingBytes;
  static constexpr int kRings = kDecode + Traits::kDecodeBytes;
  static constexpr bool kSmallRings = Traits::kActivated && Traits::kStages <= kFewStages;
  static constexpr int kBiases =
      kRings + (kSmallRings ? kFewRingBytes : kRingBytes);  ///< of each consumer
  static constexpr int kTiles = kBiases + (Traits::kActivated ? kConsumers * kBiasBytes : 0);
  static constexpr int kStarts = kTiles + kTileSlots * 16;  ///< SegmentStart [E + 1]

  template <typename Int>
  static MOEGEMM_HOST_DEVICE constexpr Int end_of_starts(Int experts) {
    return kStarts + ((experts + 1) * 8 + 15) / 16 * 16;
  }
  /// Destination and scale of each row, for tiles that are scattered or scaled.
  template <typename Int>
  static MOEGEMM_HOST_DEVICE constexpr Int row_info(Int experts) {
    return Traits::kStoresLater ? kStaging + Traits::kInfoInStaging : end_of_starts(experts);
  }
  /// Which rows of a scattered output are named.
  template <typename Int>
  static MOEGEMM_HOST_DEVICE constexpr Int named_rows(Int experts) {
    return end_of_starts(experts) + (Traits::kStoresLater ? 0 : kTileSlots * Traits::kRows * 8);
  }
  static constexpr std::int64_t total(std::int64_t experts, bool with_row_info) {
    return with_row_info ? named_rows(experts) + kLeastNamedWords * 4 : end_of_starts(experts);
  }
};

/// Defined in kernel.cuh, instantiated in a translation unit for each line and element type.
template <RowGemm Kernel, DType D>
KernelFunctions row_gemm_functions();

/// The same for lines with quantised weights, in ../quantised_gemm/kernel.cuh.
using QuantisedGemm = RowGemm;
template <QuantisedGemm Kernel, DType D>
KernelFunctions quantised_gemm_functions();

/// And for those that multiply fp32 as TF32, in ../tf32_gemm/kernel.cuh.
using Tf32Gemm = RowGemm;
template <Tf32Gemm Kernel, DType D>
KernelFunctions tf32_gemm_functions();

}  // namespace moegemm::cuda::sm90
