#pragma once

#include "cuda/device/tile_scheduler.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/sm80/row/row_gemm_params.h"
#include "cuda/sm80/row/row_tiles.h"

/// Which tile a block of a row GEMM works on next.
namespace moegemm::cuda::sm80 {

struct RowTile : moegemm::cuda::Tile {
  __device__ __forceinline__ bool is_end() const { return rows == 0; }
};

/// Tiles of all experts, from the queue that all blocks share.
template <typename Shape>
class RowScheduler {
 public:
  using Tile = RowTile;

  __device__ __forceinline__ RowScheduler(const RowGemmParams& params, const SegmentStart* starts)
      : params_(params),
        starts_(starts),
        queue_(params.counter, schedules() ? starts[params.experts].tile : 0),
        decoder_(starts, params.experts) {}

  __device__ __forceinline__ Tile decode() {
    if (queue_.done()) return {};
    const Tile tile = {params_.full_first
                           ? decode_full_first(queue_.current())
                           : decoder_.template decode<Shape::kRows, Shape::kGranule, Shape::kCols>(
                                 queue_.current())};
    queue_.advance();
    prefetch_indices(tile);
    return tile;
  }

  /// At the end, by all threads.
  __device__ __forceinline__ void leave() {
    if (threadIdx.x == Shape::kFirstCopyThread) queue_.leave();
  }

  /// The first warp that copies decodes tiles.
  static __device__ __forceinline__ bool schedules() {
    return threadIdx.x / kWarpSize == Shape::kFirstCopyThread / kWarpSize;
  }

 private:
  /// The lanes count the tiles of 32 experts at once.
  __device__ __forceinline__ moegemm::cuda::Tile decode_full_first(int number) const {
    const int lane = threadIdx.x % kWarpSize;
    const int feature_tiles = ceil_div(params_.out.cols, Shape::kCols);
    const auto rows = [&](int expert) { return starts_[expert + 1].row - starts_[expert].row; };
    int before = 0;  // tiles before those of the lanes' experts
#pragma unroll 1
    for (int base = 0, full = 1;; base += kWarpSize) {
      if (base >= params_.experts) {
        base = 0;
        full = 0;
      }
      const int own = base + lane < params_.experts
                          ? feature_tiles * tiles_in_part(full, rows(base + lane), Shape::kRows,
                                                          Shape::kGranule)
                          : 0;
      const int end = before + inclusive_scan(own, lane);
      const unsigned beyond = __ballot_sync(kFullMask, end > number);
      if (beyond != 0) {
        const int found = __ffs(beyond) - 1;
        const int first = __shfl_sync(kFullMask, end - own, found);
        return decode_tile_in_part(full, number - first, base + found, starts_[base + found].row,
                                   rows(base + found), Shape::kRows, Shape::kGranule, Shape::kCols);
      }
      before = __shfl_sync(kFullMask, end, kWarpSize - 1);
    }
  }

  /// A block waits for its indices when it starts to load a tile: let that be from L2.
  __device__ __forceinline__ void prefetch_indices(const Tile& tile) const {
    if (!params_.gather && !params_.scatter) return;
    const int index_bytes = params_.gather_indices.is_64_bit ? 8 : 4;
    const int offset = threadIdx.x % kWarpSize * 128;
    if (offset < tile.rows * index_bytes) {
      ptx::prefetch_l2(static_cast<const std::byte*>(params_.gather_indices.data) +
                       static_cast<std::int64_t>(tile.row) * index_bytes + offset);
    }
  }

  const RowGemmParams& params_;
  const SegmentStart* starts_;
  TileQueue queue_;
  TileDecoder decoder_;
};

}  // namespace moegemm::cuda::sm80
