#pragma once

#include "cuda/device/segments.cuh"
#include "cuda/sm90/row_gemm/params.h"

/// Where the rows of a tile go and what they are multiplied by, written for the epilogue.
namespace moegemm::cuda::sm90 {

/// Destination and router weight of every Step-th row of the tile from `first` on, then one arrival
/// of this thread. All loads of a kind are in flight together: done row by row, their latency adds
/// up to more than a short tile takes to multiply.
template <int Step, typename Traits>
__device__ __forceinline__ void write_row_info(const RowGemmParams& params,
                                               const RowGemmShared<Traits>& shared,
                                               const Tile& tile, int slot, int first) {
  constexpr int kCount = (Traits::kRows + Step - 1) / Step;
  int flat[kCount];
  float scale[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = first + i * Step;
    flat[i] =
        row < tile.rows ? flat_row(params.gather_indices, tile.row + row, params.flat_rows) : -1;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    scale[i] = params.multiply && flat[i] >= 0
                   ? router_weight<typename Traits::Element>(params.router_weights,
                                                             params.weights_are_fp32, flat[i])
                   : 1.0f;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = first + i * Step;
    if (row < Traits::kRows) {
      shared.destinations(slot)[row] = params.scatter ? flat[i] : tile.row + row;
      shared.scales(slot)[row] = scale[i];
    }
  }
  ptx::mbarrier_arrive(&shared.rings().info_full[slot]);
}

/// The producer warps that do not load write the row info when rows come in order. `after_tile` is
/// called when a tile's is written.
template <typename Traits, typename AfterTile>
__device__ __forceinline__ void row_info_warps(const RowGemmParams& params,
                                               const RowGemmShared<Traits>& shared,
                                               const AfterTile& after_tile) {
  PipelineState<kTileSlots> slot;
  while (true) {
    shared.rings().tile.wait_full(slot);
    const Tile tile = shared.tiles()[slot.slot];
    if (tile.rows == 0) return;
    write_row_info<Traits::kInfoWarps * kWarpSize>(params, shared, tile, slot.slot,
                                                   threadIdx.x - kWarpSize);
    ptx::mbarrier_arrive(&shared.rings().tile.empty[slot.slot]);
    slot.advance();
    after_tile();
  }
}

}  // namespace moegemm::cuda::sm90
