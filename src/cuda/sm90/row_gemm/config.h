#pragma once

#include <cstdint>

#include "cuda/device/host_device.h"

/// Shapes and shared-memory layout of the row GEMMs (forward and dX), as host-device maths.
///
/// Weights lie on wgmma's M side ("features": output columns), the rows of a segment on its N side,
/// so a tile takes any multiple of `Granule` rows and an uneven expert wastes little.
namespace moegemm::cuda::sm90 {

enum class Schedule {
  kCooperative,  ///< both consumer warpgroups share a tile, half of its features each
  kPingpong,     ///< each has its own tile; one multiplies while the other stores
};

constexpr int kDepth = 64;      ///< contraction step: 64 16-bit elements are a swizzled row
constexpr int kRowBytes = 128;  ///< bytes of such a row
constexpr int kWarpgroupThreads = 128;
constexpr int kInfoWarps = 3;  ///< producer warps beside the scheduler
constexpr int kConsumers = 2;  ///< consumer warpgroups
constexpr int kTileSlots =
    4;  ///< decoded tiles in flight: two being multiplied or stored, two ahead
constexpr int kMaxBoxes = 9;     ///< heights of a kernel's boxes of rows
constexpr int kStagedRows = 32;  ///< rows per store buffer: 4 KiB, half of a warpgroup's two
constexpr int kSharedMemoryLimit = 232448;  ///< opt-in limit of sm_90: 227 KiB

/// `Activated_`: the tile stores what its activation leaves; see activate.cuh.
template <int Features_, int Rows_, int Granule_, int Stages_, Schedule Schedule_,
          bool Activated_ = false>
struct RowTile {
  static constexpr int kFeatures = Features_;
  static constexpr int kRows = Rows_;
  static constexpr int kGranule = Granule_;
  static constexpr int kStages = Stages_;
  static constexpr Schedule kSchedule = Schedule_;
  static constexpr bool kPingpong = Schedule_ == Schedule::kPingpong;
  static constexpr bool kActivated = Activated_;
  /// A tile of few rows streams weights, for microseconds: what a block does once counts.
  static constexpr bool kStreams = kRows <= 64;

  /// Fewest wgmma columns: below 64 an instruction hardly gets faster, and each N is compiled.
  static constexpr int kMinColumns = kRows > 64 ? 64 : kGranule;
  /// m64 blocks of one warpgroup.
  static constexpr int kBlocks = kFeatures / 64 / (kPingpong ? 1 : kConsumers);
  /// Features from a warpgroup's block to its next. An activated panel has two halves, gates and
  /// their ups, and a warpgroup has a block of each.
  static constexpr int kBlockStep = kActivated ? kFeatures / 2 : 64;
  /// Features from the first of a warpgroup to the first of the other.
  static constexpr int kConsumerStep = kPingpong ? 0 : (kActivated ? 64 : kBlocks * 64);
  /// A tile's rows come in one TMA box: several would cost the copy engine tens of cycles each
  /// (Qwen3-30B fwd2 on an H200, TFLOP/s: one box 602, boxes of 64 rows 592, of 32 rows 497, of 16
  /// rows 437). It is as high as the columns that are multiplied, since what lies past them comes
  /// through L2 in vain: with full and half height only, Llama-4 Scout's fwd2 took 5 % longer and
  /// its dx1 8 %. Streaming tiles load few rows beside their weights; each height is one more map
  /// to encode.
  static constexpr int kLeastBox = kStreams ? kRows / 2 : kMinColumns;
  static constexpr int kBoxStep = kStreams ? kRows / 2 : kGranule;
  static constexpr int kBoxes = (kRows - kLeastBox) / kBoxStep + 1;
  /// Which box a tile of so many rows needs, and the height of a box.
  static MOEGEMM_HOST_DEVICE constexpr int box_of(int rows) {
    return rows <= kLeastBox ? 0 : (rows - kLeastBox + kBoxStep - 1) / kBoxStep;
  }
  static MOEGEMM_HOST_DEVICE constexpr int box_rows(int box) { return kLeastBox + box * kBoxStep; }
  static constexpr int kWeightBytes = kFeatures * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kRows * kRowBytes;
  static constexpr int kStagingBytes = kConsumers * 2 * kStagedRows * kRowBytes;
  static constexpr int kAccumulators = kBlocks * kRows / 2;
  /// Whether a plain tile adds a bias to its fp32 results where there is one. Not with the 192
  /// accumulators of a pingpong tile: code that is only jumped over cost products of short depth up
  /// to 3 % (Qwen3-Next fwd2), and the gathered 128x192 spills 12 bytes. See BiasedTile.
  static constexpr bool kAddsBias = !kPingpong || kAccumulators <= 64;

  /// Whether one copy of the stores serves every N. The first tile of a launch waits for its code,
  /// which comes from memory, and with 192 accumulators each copy is 60 KB: on an H200 16 instead
  /// of 6 microseconds for the first store of Qwen3-30B fwd2, and products of short depth are up to
  /// 11 % faster with one copy (Qwen3-Next fwd2). Cooperative tiles are up to 2 % slower, and with
  /// three blocks the registers of all N do not come together without spills.
  static constexpr bool kCommonStores = kActivated || (kPingpong && kBlocks == 2 && !kStreams);

  static_assert(kFeatures % (kPingpong ? 64 : 128) == 0);
  static_assert(kRows % kGranule == 0 && kRows <= 256);
  static_assert(kLeastBox % 8 == 0 && (kRows - kLeastBox) % kBoxStep == 0 && kBoxes <= kMaxBoxes);
  static_assert(!kActivated || kBlocks == 2, "a block of gates and a block of ups");
  static_assert(kAccumulators <= 192, "more accumulators than a consumer thread has registers");
};

/// A tile that would add no bias, for products that have one: a kernel of its own.
template <typename TileT>
struct BiasedTile : TileT {
  static constexpr bool kAddsBias = true;
};

constexpr int kRingBytes = 512;  ///< all barriers: 2 x 12 stages at most, 3 x kTileSlots, rounded
constexpr int kActivatedRingBytes = 256;  ///< 2 x 10 stages at most: every byte counts there
/// Of UnnamedRows: what a tile leaves of shared memory, within these bounds.
constexpr int kLeastNamedWords = 64;
constexpr int kMostNamedWords = 1024;
constexpr int kBiasBytes = 256;  ///< biases of a warpgroup's features in an activated tile

/// Byte offsets into dynamic shared memory. What has a size known only at run time comes last, so
/// that the main loops spend no registers on addresses.
template <typename TileT>
struct RowGemmLayout {
  static constexpr int kStaging = TileT::kStages * TileT::kStageBytes;
  static constexpr int kRings = kStaging + TileT::kStagingBytes;
  static constexpr int kBiases =
      kRings + (TileT::kActivated ? kActivatedRingBytes : kRingBytes);  ///< of each consumer
  static constexpr int kTiles = kBiases + (TileT::kActivated ? kConsumers * kBiasBytes : 0);
  static constexpr int kStarts = kTiles + kTileSlots * 16;  ///< SegmentStart [E + 1]

  /// Destination and scale of each row, for tiles that are scattered or scaled.
  template <typename Int>
  static MOEGEMM_HOST_DEVICE constexpr Int row_info(Int experts) {
    return kStarts + ((experts + 1) * 8 + 15) / 16 * 16;
  }
  /// Which rows of a scattered output are named.
  template <typename Int>
  static MOEGEMM_HOST_DEVICE constexpr Int named_rows(Int experts) {
    return row_info(experts) + kTileSlots * TileT::kRows * 8;
  }
  static constexpr std::int64_t total(std::int64_t experts, bool with_row_info) {
    return with_row_info ? named_rows(experts) + kLeastNamedWords * 4 : row_info(experts);
  }
};

}  // namespace moegemm::cuda::sm90
