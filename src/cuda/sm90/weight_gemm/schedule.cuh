#pragma once

#include "cuda/device/pipeline.cuh"
#include "cuda/device/schedule/expert_order.cuh"
#include "cuda/device/schedule/size_class.h"
#include "cuda/device/schedule/tile_scheduler.cuh"
#include "cuda/device/schedule/weight_tiles.h"
#include "cuda/sm90/weight_gemm/traits.h"

/// How the tiles of dW get from the warp that hands them out to the others, with 16 bits and TF32.
namespace moegemm::cuda::sm90 {

/// Tiles decoded ahead. More would bind tiles to a CTA long before it gets to them.
constexpr int kWeightTileSlots = 2;

/// What the scheduler needs of dynamic shared memory past its end.
constexpr int kSharedBytesPerExpert = sizeof(int) + sizeof(unsigned short);

/// A warp's view of the tiles that the scheduler publishes.
template <typename Traits>
class TileReader {
  using Tile = typename Traits::Tile;
  using Shared = typename Traits::Shared;

 public:
  __device__ __forceinline__ explicit TileReader(Shared& shared) : shared_(shared) {}

  __device__ __forceinline__ Tile next() {
    shared_.tile_ring.wait_full(slot_);
    const Tile tile = shared_.tiles[slot_.slot];
    ptx::mbarrier_arrive(&shared_.tile_ring.empty[slot_.slot]);
    slot_.advance();
    return tile;
  }

 private:
  Shared& shared_;
  PipelineState<kWeightTileSlots> slot_;
};

/// The warp that hands tiles out: looks at one after the other and publishes those that need work.
template <typename Traits, typename Params>
class TileScheduler {
  using Tile = typename Traits::Tile;
  using Shared = typename Traits::Shared;

 public:
  __device__ __forceinline__ TileScheduler(const Params& params, Shared& shared)
      : params_(params),
        shared_(shared),
        table_(build_table(params, shared)),
        lane_(threadIdx.x % kWarpSize),
        queue_(params.counter, params.experts * params.tiling.tiles_per_expert()) {}

  __device__ __forceinline__ bool done() const { return queue_.done(); }
  __device__ __forceinline__ void advance() { queue_.advance(); }
  __device__ __forceinline__ WeightTile current() const {
    WeightTile tile =
        decode_weight_tile(queue_.current(), params_.tiling, Traits::kACols, Traits::kBCols);
    table_.place(tile, params_.placement);
    return tile;
  }
  /// dW += nothing: left alone, so that not even -0.0 changes.
  __device__ __forceinline__ bool stays(const WeightTile& tile) const {
    return tile.rows == 0 && params_.adds();
  }

  __device__ __forceinline__ void publish(const Tile& tile) {
    shared_.tile_ring.wait_empty(slot_);
    if (lane_ == 0) {
      shared_.tiles[slot_.slot] = tile;
      ptx::mbarrier_arrive(&shared_.tile_ring.full[slot_.slot]);
    }
    slot_.advance();
  }
  /// After the last tile.
  __device__ __forceinline__ void end() {
    publish({});
    if (lane_ == 0) queue_.leave();
  }

 private:
  static __device__ __forceinline__ ExpertTable build_table(const Params& params, Shared& shared) {
    int* const row_prefix = shared.row_prefix;
    const ExpertTable table = {row_prefix,
                               reinterpret_cast<unsigned short*>(row_prefix + params.experts + 1)};
    table.build(params, Traits::kRows, shared.class_counts);
    __syncwarp();
    return table;
  }

  const Params& params_;
  Shared& shared_;
  ExpertTable table_;
  int lane_;
  TileQueue queue_;
  PipelineState<kWeightTileSlots> slot_;
};

}  // namespace moegemm::cuda::sm90
