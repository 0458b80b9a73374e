#pragma once

#include <cstdint>

#include "cuda/device/pipeline.cuh"
#include "cuda/device/segments.cuh"
#include "cuda/device/size_class.h"
#include "cuda/sm90/weight_gemm/params.h"

namespace moegemm::cuda::sm90 {

constexpr int kWarpgroupSize = 128;
constexpr int kMultiplyGroups = 2;
constexpr int kMultiplyWarps = kMultiplyGroups * 4;
constexpr int kWeightGemmThreads = kWarpgroupSize * (1 + kMultiplyGroups);
/// A stage always belongs to the same load warp (a warp that skipped laps could take a barrier's
/// parity two phases ahead for its own), so the stages are a multiple of this.
constexpr int kLoadWarps = 3;
/// 384 threads start with 168 registers each: 56 + 2 * 224 = 3 * 168. 192 accumulators fit 224.
constexpr int kLoadRegisters = 56;
constexpr int kMultiplyRegisters = 224;
/// Tiles decoded ahead. More would bind tiles to a CTA long before it gets to them.
constexpr int kTileSlots = 2;
/// Columns of one 128-byte-swizzled slab of 16-bit elements.
constexpr int kSlabCols = 64;

/// A compiled tile: ACols by BCols outputs, the contraction in stages of Rows rows.
template <typename T, int ACols, int BCols, int Rows, int Stages, bool FloatOutput>
struct WeightShape {
  using Element = T;
  static constexpr bool kFloatOutput = FloatOutput;
  static constexpr int kACols = ACols;
  static constexpr int kBCols = BCols;
  static constexpr int kRows = Rows;
  static constexpr int kStages = Stages;
  static constexpr int kASlabs = ACols / kSlabCols;
  static constexpr int kBSlabs = BCols / kSlabCols;
  static constexpr int kSlabBytes = Rows * kSlabCols * 2;
  static constexpr int kABytes = kASlabs * kSlabBytes;
  static constexpr int kBBytes = kBSlabs * kSlabBytes;
  /// One block of a warpgroup in 16-bit elements: 64 by BCols.
  static constexpr int kStagingBytes = 64 * BCols * 2;

  static_assert(sizeof(T) == 2);
  static_assert(ACols == kMultiplyGroups * 2 * kSlabCols, "two 64-column blocks per warpgroup");
  static_assert(BCols % kSlabCols == 0);
  static_assert(Rows == kWarpSize, "one lane per row fetches the gather index");
  static_assert(Stages % kLoadWarps == 0);
};

template <typename Shape>
struct WeightSmem {
  alignas(1024) unsigned char a[Shape::kStages][Shape::kABytes];
  alignas(1024) unsigned char b[Shape::kStages][Shape::kBBytes];
  alignas(1024) unsigned char staging[kMultiplyGroups][Shape::kStagingBytes];
  alignas(16) unsigned row_chunks[kLoadWarps][kWarpSize];  ///< see gather_rows
  Ring<Shape::kStages> loads;
  Ring<kTileSlots> tile_ring;
  WeightTile tiles[kTileSlots];
  std::uint64_t old_full[kMultiplyGroups];  ///< see WeightStore
  int class_counts[kSizeClasses];
  int row_prefix[1];  ///< experts + 1 entries, then the order: the rest of dynamic shared memory

  /// Experts in the order in which their tiles are handed out.
  __device__ __forceinline__ unsigned short* order(int experts) {
    return reinterpret_cast<unsigned short*>(row_prefix + experts + 1);
  }
};

constexpr int kSmemBytesPerExpert = sizeof(int) + sizeof(unsigned short);

/// A warp's view of the tiles that the scheduler publishes.
template <typename Shape>
class TileReader {
 public:
  __device__ __forceinline__ explicit TileReader(WeightSmem<Shape>& smem) : smem_(smem) {}

  __device__ __forceinline__ WeightTile next() {
    smem_.tile_ring.wait_full(slot_);
    const WeightTile tile = smem_.tiles[slot_.slot];
    ptx::mbarrier_arrive(&smem_.tile_ring.empty[slot_.slot]);
    slot_.advance();
    return tile;
  }

 private:
  WeightSmem<Shape>& smem_;
  PipelineState<kTileSlots> slot_;
};

}  // namespace moegemm::cuda::sm90
