#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "cuda/device/fast_divide.h"
#include "cuda/device/pipeline.cuh"
#include "cuda/device/schedule/size_class.h"
#include "cuda/device/schedule/tile_counter.h"
#include "cuda/device/schedule/weight_tiles.h"
#include "cuda/device/segments.cuh"
#include "cuda/sm90/warpgroups.h"
#include "cuda/sm90/weight_gemm/schedule.cuh"
#include "cuda/sm90/weight_gemm/traits.h"

/// dW of fp32 as TF32: shapes, what it is launched with, shared memory.
///
/// wgmma takes TF32 from shared memory only with the contraction fastest, and the contraction is
/// over rows. "A", the M side, lies as it is and is turned on its way into registers. "B" is turned
/// on its way into shared memory, through the registers of the producers: so B is the operand that
/// is gathered, where one is.
namespace moegemm::cuda::sm90 {

template <typename Traits>
struct Tf32dwShared;

template <Tf32dwGemm Kernel>
struct Tf32dwTraits {
  using Tile = WeightTile;
  using Shared = Tf32dwShared<Tf32dwTraits>;
  static constexpr int kACols = Kernel.a_cols;
  static constexpr int kBCols = Kernel.b_cols;
  static constexpr int kRows = Kernel.rows;
  static constexpr int kStages = Kernel.stages;
  static constexpr int kSlabCols = Kernel.slab_cols();
  static constexpr int kSlabBytes = kRows * 128;
  static constexpr int kASlabs = kACols / kSlabCols;
  static constexpr int kABytes = kASlabs * kSlabBytes;
  static constexpr int kBBytes = kBCols * 128;
  static constexpr int kGroupCols = kACols / kConsumers;  ///< of a warpgroup
  /// Producers hold a stage of their part of B. 88 + 2 * 208 = 3 * 168.
  static constexpr int kProducerRegisters = 88;
  static constexpr int kConsumerRegisters = 208;

  static_assert(kRows == 32, "a lane for each row, and 128 bytes of TF32");
  static_assert(kGroupCols == 128, "two m64 blocks for each warpgroup");
  static_assert(kBCols == kWarpgroupWarps * kSlabCols, "a slab for each producer warp");
};

struct Tf32dwParams : SegmentParams {
  /// {32, M, columns / 32}, box {32, 32 rows, slabs of the tile}; where 32 does not divide the
  /// columns {columns, M}, box {32, 32 rows}. Rows of the next segment come too: see
  /// Tf32dwShared::masks.
  CUtensorMap a_map;
  bool a_in_one_box;
  bool a_is_x;  ///< else A is dY
  bool accumulate;
  bool gathered;  ///< B is, else it lies in order

  const std::byte* b;
  std::int64_t b_row_bytes;
  /// [M]; data is null where no operand is permuted. A row whose index is out of range is absent.
  IndexArray gather_indices;
  FastDivisor gather_divisor;  ///< a flat index over this is the row of B

  float* out;
  std::int64_t out_stride;     ///< elements
  std::int64_t expert_stride;  ///< elements
  int a_cols;                  ///< columns of operand A: K if A is X, else N
  int b_cols;
  int flat_rows;  ///< indices are below it
  WeightTiling tiling;
  TileCounter* counter;

  MOEGEMM_HOST_DEVICE bool adds() const { return accumulate; }
};

/// Dynamic shared memory.
template <typename Traits>
struct Tf32dwShared {
  alignas(1024) std::byte a[Traits::kStages][Traits::kABytes];
  alignas(1024) std::byte b[Traits::kStages][Traits::kBBytes];
  Ring<Traits::kStages> loads;  ///< full: 1 with the bytes of A, and each producer thread
  Ring<kWeightTileSlots> tile_ring;
  typename Traits::Tile tiles[kWeightTileSlots];
  /// Which rows of a stage count. The others are zero in B; those of A are ignored, so that a NaN
  /// beyond the segment or opposite an absent row stays where it is.
  unsigned masks[Traits::kStages];
  int class_counts[kSizeClasses];
  int row_prefix[1];  ///< experts + 1 entries, then the order: the rest of dynamic shared memory
};

}  // namespace moegemm::cuda::sm90
