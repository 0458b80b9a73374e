#pragma once

#include <cstddef>

#include "cuda/device/pipeline.cuh"
#include "cuda/device/segments.cuh"
#include "cuda/device/tile_split.h"
#include "cuda/sm90/row_gemm/config.h"

namespace moegemm::cuda::sm90 {

/// Barriers of a row GEMM.
/// | ring  | full: arrivals                                   | empty: arrivals                  |
/// |-------|--------------------------------------------------|----------------------------------|
/// | stage | 1 with the bytes of TMA, + 128 cp.async (gather)  | each consumer warp of the tile   |
/// | tile  | 1, the scheduler warp                             | each thread that reads it        |
/// | info  | each thread that writes row info                  | none: freed with its tile        |
/// Threads arrive for themselves where it happens once per tile: it costs nothing there, and the
/// race checker can follow it.
template <typename TileT>
struct RowGemmRings {
  Ring<TileT::kStages> stage;
  Ring<kTileSlots> tile;
  std::uint64_t info_full[kTileSlots];
};

/// Dynamic shared memory, named.
template <typename TileT>
struct RowGemmShared {
  using Layout = RowGemmLayout<TileT>;
  std::byte* base;
  int experts;

  __device__ __forceinline__ std::byte* weights(int slot) const {
    return base + slot * TileT::kStageBytes;
  }
  __device__ __forceinline__ std::byte* rows(int slot) const {
    return weights(slot) + TileT::kWeightBytes;
  }
  /// Two store buffers of one consumer warpgroup.
  __device__ __forceinline__ std::byte* staging(int consumer) const {
    return base + Layout::kStaging + consumer * 2 * kStagedRows * kRowBytes;
  }
  /// Activated tiles: the biases of a consumer warpgroup's two blocks.
  __device__ __forceinline__ std::byte* biases(int consumer) const {
    return base + Layout::kBiases + consumer * kBiasBytes;
  }
  /// Destination row of each row of a tile, -1 for none.
  __device__ __forceinline__ int* destinations(int slot) const {
    return reinterpret_cast<int*>(base + Layout::row_info(experts)) + slot * TileT::kRows;
  }
  /// Router weight of each row of a tile.
  __device__ __forceinline__ float* scales(int slot) const {
    return reinterpret_cast<float*>(base + Layout::row_info(experts)) +
           (kTileSlots + slot) * TileT::kRows;
  }
  __device__ __forceinline__ unsigned* named_rows() const {
    return reinterpret_cast<unsigned*>(base + Layout::named_rows(experts));
  }
  __device__ __forceinline__ RowGemmRings<TileT>& rings() const {
    static_assert(sizeof(RowGemmRings<TileT>) <= Layout::kBiases - Layout::kRings);
    return *reinterpret_cast<RowGemmRings<TileT>*>(base + Layout::kRings);
  }
  __device__ __forceinline__ Tile* tiles() const {
    return reinterpret_cast<Tile*>(base + Layout::kTiles);
  }
  __device__ __forceinline__ SegmentStart* starts() const {  // [E + 1]
    return reinterpret_cast<SegmentStart*>(base + Layout::kStarts);
  }
};

}  // namespace moegemm::cuda::sm90
