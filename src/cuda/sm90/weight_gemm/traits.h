#pragma once

#include <cstdint>

#include "cuda/backend/instance.h"
#include "cuda/device/element.cuh"
#include "cuda/device/host_device.h"
#include "cuda/device/schedule/tile_split.h"
#include "cuda/device/schedule/weight_tiles.h"
#include "cuda/sm90/warpgroups.h"
#include "moegemm/kinds.h"

/// Shapes of the weight GEMM, dW = dY^T X, as host-device maths: the static tile, and how the rows
/// of a segment are cut into load stages.
///
/// "A" is the operand on wgmma's M side, "B" the one on its N side. Either of X and dY can be A;
/// the store turns the tile as needed.
namespace moegemm::cuda::sm90 {

constexpr int kConsumerWarps = kConsumers * kWarpgroupWarps;
/// A stage always belongs to the same load warp (a warp that skipped laps could take a barrier's
/// parity two phases ahead for its own), so the stages are a multiple of this.
constexpr int kLoadWarps = 3;
/// 384 threads start with 168 registers each: 56 + 2 * 224 = 3 * 168. 192 accumulators fit 224.
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;
/// Columns of one 128-byte-swizzled slab of 16-bit elements.
constexpr int kSlabCols = 64;
constexpr int kTf32SlabCols = 32;  ///< the same of fp32

/// A line of instances/sm90.inc: a_cols by b_cols outputs, the contraction in stages of `rows`
/// rows.
struct WeightGemm {
  int arch = 90;
  bool exact = true;  ///< wgmma is in sm_90a alone
  Op op;
  int a_cols;
  int b_cols;
  int rows;
  int stages;
  bool tf32 = false;  ///< of fp32, multiplied as TF32: see ../tf32dw_gemm

  /// Columns of a row of 128 bytes in shared memory.
  constexpr int slab_cols() const { return tf32 ? kTf32SlabCols : kSlabCols; }
};

/// What the scheduler hands to the other warps.
struct WeightGemmTile : WeightTile {
  bool has_absent_rows = false;  ///< some of the segment's indices are out of range
};

template <typename Traits>
struct WeightGemmShared;

/// Everything that changes the inner loop of a kernel.
template <WeightGemm Kernel, DType D, bool FloatOutput>
struct WeightGemmTraits {
  using Element = ElementType<D>;
  using Tile = WeightGemmTile;
  using Shared = WeightGemmShared<WeightGemmTraits>;
  static constexpr bool kFloatOutput = FloatOutput;
  static constexpr int kACols = Kernel.a_cols;
  static constexpr int kBCols = Kernel.b_cols;
  static constexpr int kRows = Kernel.rows;
  static constexpr int kStages = Kernel.stages;
  static constexpr int kASlabs = kACols / kSlabCols;
  static constexpr int kBSlabs = kBCols / kSlabCols;
  static constexpr int kSlabBytes = kRows * kSlabCols * 2;
  static constexpr int kABytes = kASlabs * kSlabBytes;
  static constexpr int kBBytes = kBSlabs * kSlabBytes;
  /// One block of a warpgroup in 16-bit elements: 64 by kBCols.
  static constexpr int kStagingBytes = 64 * kBCols * 2;

  static_assert(sizeof(Element) == 2);
  static_assert(kACols == kConsumers * 2 * kSlabCols, "two 64-column blocks per warpgroup");
  static_assert(kBCols % kSlabCols == 0);
  static_assert(kRows == 32, "one lane per row fetches the gather index");
  static_assert(kStages % kLoadWarps == 0);
};

/// Defined in kernel.cuh, instantiated in a translation unit for each line and element type.
template <WeightGemm Kernel, DType D>
KernelFunctions weight_gemm_functions();

/// The same for lines that multiply fp32 as TF32, in ../tf32dw_gemm/kernel.cuh.
using Tf32dwGemm = WeightGemm;
template <Tf32dwGemm Kernel, DType D>
KernelFunctions tf32dw_gemm_functions();

/// The last tile's second store hides under this many stages of the next tile's first block. One
/// is 2 % slower on 8-stage tiles, three 3 %: they hold stages that loads could fill.
constexpr int kLeadStages = 2;

/// Stages a segment is loaded in. An empty segment takes some too: the zeros that they are filled
/// with make the zero dW, so no kernel role needs to know about empty experts.
MOEGEMM_HOST_DEVICE int stages_of(int rows, int stage_rows) {
  const int stages = ceil_div(rows, stage_rows);
  return stages < kLeadStages ? kLeadStages : stages;
}

/// What a stage holds: place i has segment row `first` + i, or zeros where that is outside
/// [begin, end).
struct StageRows {
  int first;
  int begin;
  int end;
};

/// Rows that the tensor cores add up at a time.
constexpr int kGroupRows = 16;

/// Stage `index` of a tile. Every group of the tensor cores holds segment rows 16 g to 16 g + 15,
/// as in a product of these rows alone, so that the bits are the same too; where in the group does
/// not matter to them.
///
/// So the rows that are missing to whole stages are missing at the end. A tensor map can leave them
/// out there unless the segment ends less than a stage after the operand's first row. Such a
/// segment has one or two groups: each gets a stage of its own and lies at the end of that.
MOEGEMM_HOST_DEVICE StageRows rows_of_stage(const WeightTile& tile, int index, int stage_rows) {
  const auto least = [](int a, int b) { return a < b ? a : b; };
  if (tile.row + tile.rows >= stage_rows) {
    const int first = index * stage_rows;
    return {first, first, least(first + stage_rows, tile.rows)};
  }
  const int begin = least(index * kGroupRows, tile.rows);
  const int end = least(begin + kGroupRows, tile.rows);
  return {end - stage_rows, begin, end};
}

/// Stages of which every group is multiplied. One more follows if the last one has rows in its
/// first group only: a group of zeros would change no sum (but -0.0 to 0.0), and takes 0.5 to 1.4 %
/// of the time where experts have 160 to 256 rows. (The first kLeadStages are always multiplied, so
/// that a short segment's rows may lie at the end of its stages.)
MOEGEMM_HOST_DEVICE int whole_stages_of(int rows, int stage_rows) {
  const int stages = stages_of(rows, stage_rows);
  const int in_last = rows - (stages - 1) * stage_rows;
  return stages > kLeadStages && in_last <= stage_rows - kGroupRows ? stages - 1 : stages;
}

/// Where a stage is read in a map of an input, in dimensions "stage rows" and "M": see
/// WeightGemmParams.
struct StageBox {
  int stage_row;
  int row;
};

MOEGEMM_HOST_DEVICE StageBox box_of_stage(const WeightTile& tile, const StageRows& stage,
                                          int stage_rows) {
  if (stage.begin >= stage.end) return {stage_rows, 0};
  if (stage.first < stage.begin) return {stage.first - stage.begin, tile.row + stage.begin};
  const int missing = stage.first + stage_rows - stage.end;
  return {missing, tile.row + stage.first - missing};
}

/// Which operand takes the M side. The gathered one must: its copies cost producer instructions,
/// and they are cheapest per FLOP on the wide side. Otherwise the side that pads less.
inline bool a_side_is_x(bool gathers_x, bool gathers_dy, std::int64_t n, std::int64_t k, int a_tile,
                        int b_tile) {
  if (gathers_x || gathers_dy) return gathers_x;
  const auto padded = [](std::int64_t cols, std::int64_t tile) {
    return (cols + tile - 1) / tile * tile;
  };
  return padded(k, a_tile) * padded(n, b_tile) <= padded(n, a_tile) * padded(k, b_tile);
}

}  // namespace moegemm::cuda::sm90
