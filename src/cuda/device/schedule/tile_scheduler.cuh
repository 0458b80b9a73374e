#pragma once

#include "cuda/device/schedule/tile_counter.h"
#include "cuda/device/schedule/tile_split.h"
#include "cuda/device/segments.cuh"
#include "cuda/ptx/atom.cuh"

/// Which tile a thread block works on next: one atomic counter over the tiles of all experts.
namespace moegemm::cuda {

/// Hands out tile numbers to one warp of each block. Without a counter the block strides through
/// the tiles, which is always right and a few percent slower on uneven experts.
class TileQueue {
 public:
  __device__ __forceinline__ TileQueue(TileCounter* counter, int total)
      : counter_(counter), total_(total), current_(blockIdx.x) {
    // Nothing may be in flight when the block leaves: a late increment would survive the reset.
    if (!done()) fetch();
  }

  __device__ __forceinline__ bool done() const { return current_ >= total_; }
  __device__ __forceinline__ int current() const { return current_; }

  /// Takes the number that was fetched while the last tile was loaded.
  __device__ __forceinline__ void advance() {
    current_ = __shfl_sync(kFullMask, next_, 0) + static_cast<int>(gridDim.x);
    if (!done()) fetch();
  }

  /// Called once, by one lane, when this block has seen the end of the queue.
  __device__ __forceinline__ void leave() {
    if (!counter_) return;
    if (atomicAdd(&counter_->finished, 1u) + 1 == gridDim.x) {
      counter_->next = 0;
      counter_->finished = 0;
      __threadfence();
    }
  }

 private:
  __device__ __forceinline__ void fetch() {
    if (counter_) {
      if (threadIdx.x % kWarpSize == 0) {
        next_ = static_cast<int>(ptx::atom_increment(&counter_->next));
      }
    } else {
      next_ = current_;
    }
  }

  TileCounter* counter_;
  int total_;
  int current_;
  int next_ = 0;  ///< less gridDim.x: nothing may be done with it before it is needed
};

/// Turns tile numbers, which only grow, into tiles: 32 experts are looked at at once and the search
/// never goes back. Called by one whole warp.
class TileDecoder {
 public:
  /// `starts` has experts + 1 entries.
  __device__ __forceinline__ TileDecoder(const SegmentStart* starts, int experts)
      : starts_(starts), experts_(experts) {}

  template <int MaxRows, int Granule, int FeatureTile>
  __device__ __forceinline__ Tile decode(int number) {
    const int lane = threadIdx.x % kWarpSize;
    // The expert is the first whose end lies beyond `number`; empty experts end where they begin.
    while (true) {
      const int expert = base_ + lane;
      const bool beyond = expert >= experts_ || starts_[expert + 1].tile > number;
      const unsigned mask = __ballot_sync(kFullMask, beyond);
      if (mask != 0) {
        base_ += __ffs(mask) - 1;
        break;
      }
      base_ += kWarpSize;
    }
    const SegmentStart start = starts_[base_];
    return decode_tile(number - start.tile, base_, start.row, starts_[base_ + 1].row - start.row,
                       MaxRows, Granule, FeatureTile);
  }

 private:
  const SegmentStart* starts_;
  int experts_;
  int base_ = 0;
};

}  // namespace moegemm::cuda
