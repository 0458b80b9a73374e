#pragma once

#include "cuda/device/segments.cuh"
#include "cuda/device/swizzle.h"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/row_gemm/store.cuh"

/// Scattered results of tiles of many rows: consumers stage them (store_later), and a producer warp
/// stores them while the next tile is multiplied.
namespace moegemm::cuda::sm90 {

/// Rows that a warp has in registers at a time: a lane has 16 bytes of each fourth.
constexpr int kScatteredRows = 32;

/// Waits until a consumer has staged `count` rows, stores them and hands the buffer back. The first
/// row goes where index `position` says. The first indices are requested before it waits.
template <typename Traits>
__device__ __forceinline__ void scatter_rows(const RowGemmParams& params,
                                             const RowGemmShared<Traits>& shared, int consumer,
                                             int position, int count, int feature) {
  using T = typename Traits::Element;
  constexpr int kEach = kScatteredRows / 4;
  const int lane = threadIdx.x % kWarpSize;
  const int column = feature + consumer * Traits::kConsumerStep + lane % 8 * 8;
  const std::byte* const staging = shared.staging(consumer);
  const auto fetch = [&](int row) {
    return params.gather_indices.fetch(position + min(row, count - 1));
  };
  IndexArray::Fetched index = fetch(lane);
  ptx::bar_sync(barrier_id(NamedBarrier::kStaged, consumer), kScatterThreads);
#pragma unroll 1
  for (int base = 0; base < count; base += kScatteredRows) {
    // Kept: else the assembler compares it where it was requested, and waits there.
    index.high = ptx::keep(index.high);
    const int own = base + lane < count ? index.below(params.flat_rows) : -1;
    index = fetch(base + kScatteredRows + lane);
    uint4 values[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      values[i] = *reinterpret_cast<const uint4*>(
          staging + base * kRowBytes + swizzle_128b(4 * i + lane / 8, lane % 8));
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = __shfl_sync(kFullMask, own, 4 * i + lane / 8);
      if (row >= 0 && column < params.features) {
        *reinterpret_cast<uint4*>(static_cast<T*>(params.out) + row * params.out_stride + column) =
            values[i];
      }
    }
  }
  __syncwarp();
  ptx::bar_arrive(barrier_id(NamedBarrier::kDrained, consumer), kScatterThreads);
}

/// All tiles of a block, by one warp; `after_tile` is called when it has stored one.
template <typename Traits, typename AfterTile>
__device__ __forceinline__ void scatter_tiles(const RowGemmParams& params,
                                              const RowGemmShared<Traits>& shared,
                                              const AfterTile& after_tile) {
  static_assert(Traits::kInfoWarps == 1 && Traits::kStagingRows % kScatteredRows == 0);
  auto& ring = shared.rings().tile;
  for (int consumer = 0; consumer < kConsumers; ++consumer) {  // their buffers are free
    ptx::bar_arrive(barrier_id(NamedBarrier::kDrained, consumer), kScatterThreads);
  }
  PipelineState<kTileSlots> slot;
  while (true) {
    ring.wait_full(slot);
    const Tile tile = shared.tiles()[slot.slot];
    if (tile.rows == 0) return;
    ptx::mbarrier_arrive(&ring.empty[slot.slot]);
#pragma unroll 1
    for (int first = last_staging<Traits>(tile.rows); first >= 0; first -= Traits::kStagingRows) {
#pragma unroll 1
      for (int consumer = 0; consumer < kConsumers; ++consumer) {
        scatter_rows(params, shared, consumer, tile.row + first,
                     min(tile.rows - first, Traits::kStagingRows), tile.feature);
      }
    }
    slot.advance();
    after_tile();
  }
}

}  // namespace moegemm::cuda::sm90
