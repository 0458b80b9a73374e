#pragma once

#include "cuda/device/schedule/size_class.h"
#include "cuda/device/schedule/weight_tiles.h"
#include "cuda/device/segment_scan.cuh"

/// In which order the weight GEMMs take the experts.
namespace moegemm::cuda {

/// Fills order[0..experts) with the experts: those of more than `large` units first, by descending
/// size class, then all others by number. A large expert's tiles take long: handed out first, they
/// do not keep one block busy when all others have run out of work. The others stay mixed, so that
/// at any time some tiles multiply while others store. Called by one whole warp; `counts` is
/// scratch.
__device__ inline void order_large_first(const int* row_prefix, int experts, int unit_rows,
                                         int large, int (&counts)[kSizeClasses],
                                         unsigned short* order) {
  static_assert(kSizeClasses == kWarpSize);
  const int lane = threadIdx.x % kWarpSize;
  const auto class_of = [&](int expert) {
    const int units = ceil_div(row_prefix[expert + 1] - row_prefix[expert], unit_rows);
    return units > large ? size_class(units) : 0;
  };
  bool any_large = false;
  for (int expert = lane; expert < experts; expert += kWarpSize) {
    any_large |= class_of(expert) > 0;
    order[expert] = static_cast<unsigned short>(expert);
  }
  if (!__any_sync(kFullMask, any_large)) return;
  counts[lane] = 0;
  __syncwarp();
  for (int expert = lane; expert < experts; expert += kWarpSize) {
    atomicAdd(&counts[class_of(expert)], 1);
  }
  __syncwarp();
  // Where each class starts: after all larger ones.
  const int own = counts[kWarpSize - 1 - lane];
  counts[kWarpSize - 1 - lane] = inclusive_scan(own, lane) - own;
  __syncwarp();
  for (int base = 0; base < experts; base += kWarpSize) {
    const int expert = base + lane;
    const int size = expert < experts ? class_of(expert) : -1;
    const unsigned peers = __match_any_sync(kFullMask, size);
    const int rank = __popc(peers & ((1u << lane) - 1));
    if (size >= 0) order[counts[size] + rank] = static_cast<unsigned short>(expert);
    __syncwarp();
    if (size >= 0 && rank == 0) counts[size] += __popc(peers);
    __syncwarp();
  }
}

/// Row prefix sums and the order of the experts, in shared memory.
struct ExpertTable {
  int* row_prefix;        ///< [E + 1]
  unsigned short* order;  ///< [E]: experts, large ones first

  /// By one whole warp. `unit_rows`: rows of a block of depth; `counts` is scratch.
  template <typename Params>
  __device__ __forceinline__ void build(const Params& params, int unit_rows,
                                        int (&counts)[kSizeClasses]) const {
    scan_segments<1>(params, RowStarts{row_prefix});
    __syncwarp();
    // A tile that starts last can make the launch this much longer: 1/32 of a block's share at
    // most.
    const float share = static_cast<float>(row_prefix[params.experts] / unit_rows) *
                        static_cast<float>(params.tiling.tiles_per_expert()) /
                        static_cast<float>(gridDim.x);
    order_large_first(row_prefix, params.experts, unit_rows, static_cast<int>(share / 32), counts,
                      order);
  }

  /// Expert and rows of a decoded tile.
  __device__ __forceinline__ void place(WeightTile& tile, const Placement& placement) const {
    tile.expert = order[tile.expert];
    tile.row = row_prefix[tile.expert];
    tile.rows = row_prefix[tile.expert + 1] - tile.row;
    if (placement.given()) tile.row = placement.begin(tile.expert);
  }
};

}  // namespace moegemm::cuda
