#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "cuda/device/fast_divide.h"
#include "cuda/device/pipeline.cuh"
#include "cuda/device/schedule/tile_counter.h"
#include "cuda/device/schedule/tile_split.h"
#include "cuda/device/segments.cuh"
#include "cuda/sm90/row_gemm/traits.h"
#include "moegemm/epilogue.h"

namespace moegemm::cuda::sm90 {

/// Where shared memory says how far each segment is from where it would be if segments followed one
/// another. For those that do, every expert finds the one zero with which the starts begin.
struct SegmentShifts {
  int offset;  ///< bytes
  int mask;    ///< of experts: all bits, or none
};

/// The scales of quantised weights: that of W_e[n, k] is number
/// e * expert_scales + (n >> row_shift) * row_scales + (k >> column_shift).
struct WeightScales {
  const std::byte* data;
  std::int64_t expert_scales;
  int row_scales;
  int row_shift;
  int column_shift;
  ScaleType type;
  int bytes;  ///< of a scale
};

/// What a row GEMM is launched with. Forward: features = N, depth = K, rows of X. dX: features =
/// K, depth = N, rows of dY.
struct RowGemmParams : SegmentParams {
  /// Forward: {K, N, E}, box {64, features of the tile, 1}. dX: {64, N, K / 64, E}, box {64, 64,
  /// slabs of the tile, 1}, so that a panel of 64-column slabs is one copy; {K, N, E}, box {64, 64,
  /// 1} where K is not a multiple of 64. Quantised, of packed values: {K, N, E}, box {64, features
  /// of the tile, 1}; dX: box {features of the tile, 64, 1}. Activated tiles: {K, N / 2, 2, E}, box
  /// {64, half of the tile's features, 2, 1}, or {K, N, 1, E} without a gate. TF32: 32 for 64, and
  /// forward {K, 8, 4, N / 32, E} with the strides of features 4, 1 and 32: feature 4 g + q of 32
  /// is in row 8 q + g. As above where N is not a multiple of 32.
  CUtensorMap weights_map;
  CUtensorMap rows_maps[kMaxBoxes];  ///< {depth, M}, box {64, box_rows(i)}; for rows in order

  /// The low-rank part's: as weights_map and the rows' with full boxes, in steps of
  /// Traits::kLowDepth.
  CUtensorMap low_weights_map;
  CUtensorMap low_rows_map;

  const std::byte* rows;   ///< gathered rows: base address
  std::int64_t row_bytes;  ///< and pitch
  void* out;
  std::int64_t out_stride;  ///< elements

  IndexArray gather_indices;
  const void* router_weights;
  TileCounter* counter;

  SegmentShifts shifts;
  int named_words;  ///< of shared memory, for UnnamedRows
  int flat_rows;    ///< indices are below it; rows of a scattered output
  int features;
  int depth;
  int low_rank;         ///< more depth, after it: the low-rank part's; 0: none
  int blocks;           ///< of 64, of the depth and of the low rank
  FastDivisor divisor;  ///< a gathered flat index over this is the row to read

  bool rows_pending;  ///< the launch ahead may still write the rows, and nothing else that is read
  bool weights_pass_through;  ///< plain forward tiles: L2 need not keep the weights
  bool weights_in_slabs;      ///< dX: one copy per slab, which do not divide K; TF32: see the map
  bool scatter;               ///< result row r goes to flat row gather_indices[r]
  bool multiply;              ///< and is scaled by router_weights of that flat row
  bool weights_are_fp32;
  bool out_is_fp32;
  bool rounds;        ///< the opposite, for the common epilogue: one flag would stay in a register
  bool vector_store;  ///< 16-byte stores of 16-bit results are aligned

  WeightScales scales;  ///< quantised weights only

  const void* bias;  ///< [experts, features] in the dtype of the inputs; null: none
  std::int64_t bias_stride;

  // Activated tiles only.
  Activation activation;
  int columns;    ///< of the output: features, or half as many after a gate
  int bias_step;  ///< column c has its gate's bias at c * bias_step,
  int first_up;   ///< and its up's at first_up + c * bias_step

  /// Tiles that store while the next one is multiplied: {features, M, 1}, box {64, kStagedRows, 1}.
  CUtensorMap out_map;
  bool stores_later;  ///< results are in order, and TMA can store them
};

/// Named barriers; 0 is __syncthreads'.
enum class NamedBarrier : int {
  kMainloop = 1,  ///< + consumer
  kStore = 3,     ///< + consumer
  kScan = 5,
  kNamedRows = 6,
};

__device__ __forceinline__ int barrier_id(NamedBarrier barrier, int consumer) {
  return static_cast<int>(barrier) + consumer;
}

/// Barriers of a row GEMM.
/// | ring  | full: arrivals                                   | empty: arrivals                  |
/// |-------|--------------------------------------------------|----------------------------------|
/// | stage | 1 with the bytes of TMA, + 128 cp.async (gather)  | each consumer warp of the tile   |
/// | tile  | 1, the scheduler warp                             | each thread that reads it        |
/// | info  | each thread that writes row info                  | none: freed with its tile        |
/// Decoded weights: every thread of a consumer warp hands a stage back. Tabled tiles: a full stage
/// has the arrivals of the warp that writes its scales, too. Threads arrive for themselves where it
/// happens once per tile: it costs nothing there, and the race checker can follow it.
template <typename Traits>
struct RowGemmRings {
  Ring<Traits::kStages> stage;
  Ring<kTileSlots> tile;
  std::uint64_t info_full[kTileSlots];
};

/// Dynamic shared memory, named.
template <typename Traits>
struct RowGemmShared {
  using Layout = RowGemmLayout<Traits>;
  std::byte* base;
  int experts;

  __device__ __forceinline__ std::byte* weights(int slot) const {
    return base + slot * Traits::kStageBytes;
  }
  __device__ __forceinline__ std::byte* rows(int slot) const {
    return weights(slot) + Traits::kWeightBytes;
  }
  /// Quantised weights: the table of the decoder, and those of a stage's scales.
  __device__ __forceinline__ std::byte* decode_tables() const { return base + Layout::kDecode; }
  __device__ __forceinline__ std::byte* scale_table(int slot) const {
    return base + Layout::kDecode + (Traits::kPairTable ? kPairTableBytes : 0) +
           slot * Traits::kTableBytes;
  }
  /// The store buffers of one consumer warpgroup.
  __device__ __forceinline__ std::byte* staging(int consumer) const {
    return base + Layout::kStaging + consumer * Traits::kStagingRows * kRowBytes;
  }
  /// Activated tiles: the biases of a consumer warpgroup's two blocks.
  __device__ __forceinline__ std::byte* biases(int consumer) const {
    return base + Layout::kBiases + consumer * kBiasBytes;
  }
  /// Destination row of each row of a tile, -1 for none.
  __device__ __forceinline__ int* destinations(int slot) const {
    return reinterpret_cast<int*>(base + Layout::row_info(experts)) + slot * Traits::kRows;
  }
  /// Router weight of each row of a tile.
  __device__ __forceinline__ float* scales(int slot) const {
    return reinterpret_cast<float*>(base + Layout::row_info(experts)) +
           (kTileSlots + slot) * Traits::kRows;
  }
  __device__ __forceinline__ unsigned* named_rows() const {
    return reinterpret_cast<unsigned*>(base + Layout::named_rows(experts));
  }
  __device__ __forceinline__ RowGemmRings<Traits>& rings() const {
    static_assert(sizeof(RowGemmRings<Traits>) <= Layout::kBiases - Layout::kRings);
    return *reinterpret_cast<RowGemmRings<Traits>*>(base + Layout::kRings);
  }
  __device__ __forceinline__ Tile* tiles() const {
    return reinterpret_cast<Tile*>(base + Layout::kTiles);
  }
  __device__ __forceinline__ int& shift(const SegmentShifts& shifts, int expert) const {
    return reinterpret_cast<int*>(base + shifts.offset)[expert & shifts.mask];
  }
  __device__ __forceinline__ SegmentStart* starts() const {  // [E + 1]
    return reinterpret_cast<SegmentStart*>(base + Layout::kStarts);
  }
};

}  // namespace moegemm::cuda::sm90
