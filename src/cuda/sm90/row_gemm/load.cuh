#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>
#include <type_traits>

#include "cuda/device/schedule/tile_scheduler.cuh"
#include "cuda/device/swizzle.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/griddepcontrol.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/sm90/row_gemm/params.h"

/// The producer warpgroup of the row GEMMs: scheduling and loads.
namespace moegemm::cuda::sm90 {

/// The wgmma N that covers a tile's rows.
template <typename Traits>
__device__ __forceinline__ int padded_rows(int rows) {
  return ceil_div(rows, Traits::kGranule) * Traits::kGranule;
}

/// Starts the copy of a weight panel of `map`. Boxes that reach past the tensor are filled with
/// zeros and count in full.
template <typename Traits, bool Quantised = Traits::kQuantised>
__device__ __forceinline__ void load_weights(const RowGemmParams& params, const CUtensorMap* map,
                                             const Tile& tile, int depth, std::byte* shared,
                                             std::uint64_t* full) {
  if constexpr (Traits::kActivated) {  // gates, then as many ups; or kFeatures of N
    static_assert(Traits::kDepthMajor);
    const int column = params.activation.gated() ? tile.feature / 2 : tile.feature;
    ptx::cp_async_bulk_tensor_4d(shared, map, depth, column, 0, tile.expert, full);
  } else if constexpr (Quantised && !Traits::kDepthMajor) {  // maps count in units of 16 bits
    constexpr int kUnit = 16 / Traits::kKernel.weight_bits();
    ptx::cp_async_bulk_tensor_3d(shared, map, tile.feature / kUnit, depth, tile.expert, full);
  } else if constexpr (Traits::kTf32 && Traits::kDepthMajor) {
    if (params.weights_in_slabs) {
      ptx::cp_async_bulk_tensor_3d(shared, map, depth, tile.feature, tile.expert, full);
    } else {
      ptx::cp_async_bulk_tensor_5d(shared, map, depth, 0, 0, tile.feature / 32, tile.expert, full);
    }
  } else if constexpr (Traits::kDepthMajor) {  // box {64 of K, kFeatures of N}
    if constexpr (Quantised) depth /= 16 / Traits::kKernel.weight_bits();
    if (params.weights_pass_through) {
      ptx::cp_async_bulk_tensor_3d(shared, map, depth, tile.feature, tile.expert, full,
                                   ptx::createpolicy_evict_first());
    } else {
      ptx::cp_async_bulk_tensor_3d(shared, map, depth, tile.feature, tile.expert, full);
    }
  } else if (!params.weights_in_slabs) {
    constexpr int kSlab = Traits::kPanelDepth;  // as wide as deep
    ptx::cp_async_bulk_tensor_4d(shared, map, 0, depth, tile.feature / kSlab, tile.expert, full);
  } else {
#pragma unroll
    for (int slab = 0; slab < Traits::kFeatures / Traits::kPanelDepth; ++slab) {
      const int first = slab * Traits::kPanelDepth;
      ptx::cp_async_bulk_tensor_3d(shared + first * kRowBytes, map, tile.feature + first, depth,
                                   tile.expert, full);
    }
  }
}

/// The low-rank part's depth as it is multiplied: every kernel takes the same steps.
template <typename Traits>
__device__ __forceinline__ int low_depth(const RowGemmParams& params) {
  return Traits::kQuantised ? ceil_div(params.low_rank, kDepth) * kDepth : params.low_rank;
}

/// The part of a low-rank stage that one thread starts: both operands by TMA. Its rows lie in order
/// also where the others are gathered; a full box of them is more than the tile needs, but one map.
template <typename Traits>
__device__ __forceinline__ void load_low_rank(const RowGemmParams& params,
                                              const RowGemmShared<Traits>& shared, const Tile& tile,
                                              int depth, int slot) {
  std::uint64_t* full = &shared.rings().stage.full[slot];
  constexpr int kDepthBytes =
      Traits::kLowDepth * static_cast<int>(sizeof(typename Traits::Element));
  constexpr int kBytes = (Traits::kFeatures + Traits::kRows) * kDepthBytes;
  static_assert(kBytes <= Traits::kStageBytes &&
                kDepthBytes * Traits::kFeatures <= Traits::kWeightBytes);
  ptx::mbarrier_arrive_expect_tx(full, kBytes);
  load_weights<Traits, false>(params, &params.low_weights_map, tile, depth, shared.weights(slot),
                              full);
  ptx::cp_async_bulk_tensor_2d(shared.rows(slot), &params.low_rows_map, depth, tile.row, full);
}

/// The scheduler warp publishes a decoded tile; rows == 0 ends the work.
template <typename Traits>
__device__ __forceinline__ void publish_tile(const RowGemmShared<Traits>& shared, const Tile& tile,
                                             const PipelineState<kTileSlots>& slot) {
  auto& ring = shared.rings().tile;
  ring.wait_empty(slot);
  if (threadIdx.x % kWarpSize == 0) {
    shared.tiles()[slot.slot] = tile;
    ptx::mbarrier_arrive(&ring.full[slot.slot]);
  }
  __syncwarp();
}

/// For every consumer that waits for a tile of its own.
template <typename Traits>
__device__ __forceinline__ void publish_end(const RowGemmShared<Traits>& shared,
                                            PipelineState<kTileSlots> slot) {
  for (int i = 0; i < (Traits::kPingpong ? kConsumers : 1); ++i, slot.advance()) {
    publish_tile(shared, Tile{}, slot);
  }
}

/// The tile of a number, where it really is. No branch for segments that follow one another, and no
/// load from memory for others: the warp that schedules is late already when a tile begins.
template <typename Traits>
__device__ __forceinline__ Tile find_tile(const RowGemmParams& params,
                                          const RowGemmShared<Traits>& shared, TileDecoder& decoder,
                                          int number) {
  Tile tile = decoder.decode<Traits::kRows, Traits::kGranule, Traits::kFeatures>(number);
  tile.row += shared.shift(params.shifts, tile.expert);
  return tile;
}

/// Brings the scales of a forward tile into L2, by a whole warp: consumers load them late. Those of
/// a dX tile lie far apart.
template <typename Traits>
__device__ __forceinline__ void prefetch_scales(const RowGemmParams& params, const Tile& tile) {
  if constexpr (Traits::kDepthMajor) {
    const WeightScales& scales = params.scales;
    const int first = tile.feature >> scales.row_shift;
    const int last = min(tile.feature + Traits::kFeatures, params.features) - 1 >> scales.row_shift;
    const int bytes = (last - first + 1) * scales.row_scales * scales.bytes;
    const std::byte* data = scales.data + (tile.expert * scales.expert_scales +
                                           static_cast<std::int64_t>(first) * scales.row_scales) *
                                              scales.bytes;
    for (int at = threadIdx.x % kWarpSize * 128; at < bytes; at += kWarpSize * 128) {
      ptx::prefetch_l2(data + at);
    }
  }
}

/// Bytes of a stage of rows in order.
template <typename Traits>
__device__ __forceinline__ int ordered_stage_bytes(int box) {
  return Traits::kWeightBytes + Traits::kPanels * Traits::box_rows(box) * kRowBytes;
}

/// Starts the copies of the weights of this block's first tile, as many stages as the ring has:
/// returns how many. Their rows follow when the launch ahead has made them.
template <typename Traits>
__device__ __forceinline__ int load_early_weights(const RowGemmParams& params,
                                                  const RowGemmShared<Traits>& shared,
                                                  TileDecoder& decoder, bool leader) {
  const auto first = static_cast<int>(blockIdx.x);
  if (first >= shared.starts()[params.experts].tile) return 0;
  const Tile tile = find_tile(params, shared, decoder, first);
  const int stages = min(ceil_div(params.depth, Traits::kStageDepth), Traits::kStages);
  if (!leader) return stages;
  const int bytes = ordered_stage_bytes<Traits>(Traits::box_of(tile.rows));
#pragma unroll 1
  for (int slot = 0; slot < stages; ++slot) {
    std::uint64_t* full = &shared.rings().stage.full[slot];
    ptx::mbarrier_arrive_expect_tx(full, bytes);
    load_weights<Traits>(params, &params.weights_map, tile, slot * Traits::kStageDepth,
                         shared.weights(slot), full);
  }
  return stages;
}

/// Every stage of a tile of rows in order; the weights of the first `early` are on their way. A
/// low-rank part is more blocks of the same loop: a second one, jumped over, made Qwen3-30B fwd2 on
/// an H200 1 % slower.
template <typename Traits>
__device__ __forceinline__ void load_ordered_tile(const RowGemmParams& params,
                                                  const RowGemmShared<Traits>& shared,
                                                  const Tile& tile, bool leader, int early,
                                                  PipelineState<Traits::kStages>& stage) {
  auto& ring = shared.rings().stage;
  const int box = Traits::box_of(tile.rows);
  const CUtensorMap* weights_map = &params.weights_map;
  const CUtensorMap* rows_map = &params.rows_maps[box];
  int bytes = ordered_stage_bytes<Traits>(box);
  int depth = 0;
  int left = params.depth;  // of it; then the low-rank part begins
#pragma unroll 1
  for (int block = 0; block < params.blocks; ++block) {
    if (left <= 0) {  // its rows have one map: a full box is more than the tile needs
      weights_map = &params.low_weights_map;
      rows_map = &params.low_rows_map;
      bytes = Traits::kStageBytes;
      depth = 0;
      left = INT_MAX;
    }
    ring.wait_empty(stage);
    if (leader) {
      std::uint64_t* full = &ring.full[stage.slot];
      if (!Traits::kStreams || block >= early) {
        ptx::mbarrier_arrive_expect_tx(full, bytes);
        load_weights<Traits>(params, weights_map, tile, depth, shared.weights(stage.slot), full);
      }
      // Rows of the next segment may follow: they only reach columns that are never stored.
      ptx::cp_async_bulk_tensor_2d(shared.rows(stage.slot), rows_map, depth, tile.row, full);
    }
    __syncwarp();
    stage.advance();
    depth += Traits::kPanelDepth;
    left -= Traits::kPanelDepth;
  }
}

/// The same of quantised weights, whose low-rank part has stages of its own kind.
template <typename Traits>
__device__ __forceinline__ void load_ordered_quantised_tile(const RowGemmParams& params,
                                                            const RowGemmShared<Traits>& shared,
                                                            const Tile& tile, bool leader,
                                                            int early,
                                                            PipelineState<Traits::kStages>& stage) {
  auto& ring = shared.rings().stage;
  const int box = Traits::box_of(tile.rows);
  const CUtensorMap* rows_map = &params.rows_maps[box];
  const int bytes = ordered_stage_bytes<Traits>(box);
  for (int depth = 0; depth < params.depth; depth += Traits::kStageDepth) {
    ring.wait_empty(stage);
    if (leader) {
      std::uint64_t* full = &ring.full[stage.slot];
      if (!Traits::kStreams || depth >= early * Traits::kStageDepth) {
        ptx::mbarrier_arrive_expect_tx(full, bytes);
        load_weights<Traits>(params, &params.weights_map, tile, depth, shared.weights(stage.slot),
                             full);
      }
#pragma unroll
      for (int panel = 0; panel < Traits::kPanels; ++panel) {
        ptx::cp_async_bulk_tensor_2d(shared.rows(stage.slot) + panel * Traits::kRowsBytes, rows_map,
                                     depth + panel * kDepth, tile.row, full);
      }
    }
    __syncwarp();
    stage.advance();
  }
#pragma unroll 1
  for (int depth = 0; depth < low_depth<Traits>(params); depth += Traits::kLowDepth) {
    ring.wait_empty(stage);
    if (leader) load_low_rank(params, shared, tile, depth, stage.slot);
    __syncwarp();
    stage.advance();
  }
}

/// Rows in order: one warp schedules and issues every copy.
template <typename Traits>
__device__ __forceinline__ void load_in_order(const RowGemmParams& params,
                                              const RowGemmShared<Traits>& shared) {
  const bool leader = threadIdx.x % kWarpSize == 0;
  TileDecoder decoder(shared.starts(), params.experts);
  int early = 0;
  if constexpr (Traits::kStreams) {
    if (params.rows_pending) early = load_early_weights(params, shared, decoder, leader);
    ptx::griddepcontrol_wait();
  }
  ptx::griddepcontrol_launch_dependents();
  // Not before: the launch ahead may have the same counter.
  TileQueue queue(params.counter, shared.starts()[params.experts].tile);
  PipelineState<Traits::kStages> stage;
  PipelineState<kTileSlots> slot;
  for (; !queue.done(); queue.advance(), slot.advance()) {
    const Tile tile = find_tile(params, shared, decoder, queue.current());
    publish_tile(shared, tile, slot);
    if constexpr (Traits::kQuantised) {
      prefetch_scales<Traits>(params, tile);
      load_ordered_quantised_tile(params, shared, tile, leader, early, stage);
    } else {
      load_ordered_tile(params, shared, tile, leader, early, stage);
    }
    early = 0;
  }
  publish_end(shared, slot);
  if (leader) queue.leave();
}

/// Loads of gathered rows write scales where there are any: see ../quantised_gemm/scales.cuh.
struct NoScales {};
template <typename Traits, int Ahead>
class ScaleWriter;
template <typename Traits>
using GatheredScales = std::conditional_t<Traits::kTabled, ScaleWriter<Traits, 1>, NoScales>;

/// The rows of one gathered tile that a thread copies: one 16-byte chunk of every 16th row.
template <typename Traits>
struct GatheredRows {
  static constexpr int kStep = 16;
  static constexpr int kCount = Traits::kRows / kStep;

  const std::byte* pointers[kCount];
  unsigned missing = 0;  ///< bit i: index out of range, reads as zeros

  __device__ __forceinline__ void advance(int stages) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) pointers[i] += stages * kRowBytes;
  }

  __device__ __forceinline__ void locate(const RowGemmParams& params, const Tile& tile,
                                         int thread) {
    int flat[kCount];  // all loads in flight before the first use
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // Rows past the tile repeat its last one, and are never stored.
      const int row = min(thread / 8 + i * kStep, tile.rows - 1);
      flat[i] = params.gather_indices.fetch(tile.row + row).below(params.flat_rows);
    }
    missing = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (flat[i] < 0) missing |= 1u << i;
      const unsigned source = params.divisor.divide(static_cast<unsigned>(max(flat[i], 0)));
      pointers[i] = params.rows + source * params.row_bytes + (thread % 8) * 16;
    }
  }
};

/// The rows of a tile that are rounded on their way: see ../tf32_gemm/load.cuh.
template <typename Traits>
class RoundedRows;
template <typename Traits>
using RowSources = std::conditional_t<Traits::kTf32, RoundedRows<Traits>, GatheredRows<Traits>>;

/// One stage of a gathered tile, `Offset` bytes of each panel past the row pointers. `Checked`:
/// rows may be missing and the depth may end inside.
template <typename Traits, bool Checked, int Offset = 0>
__device__ __forceinline__ void load_gathered_stage(const RowGemmParams& params,
                                                    const RowGemmShared<Traits>& shared,
                                                    const Tile& tile, int depth,
                                                    const GatheredRows<Traits>& rows,
                                                    GatheredScales<Traits>& scales, int writer,
                                                    PipelineState<Traits::kStages>& stage) {
  const int thread = threadIdx.x;  // of the first warpgroup
  auto& ring = shared.rings().stage;
  ring.wait_empty(stage);
  std::uint64_t* full = &ring.full[stage.slot];
  if (thread == 0) {
    ptx::mbarrier_arrive_expect_tx(full, Traits::kWeightBytes);
    load_weights<Traits>(params, &params.weights_map, tile, depth, shared.weights(stage.slot),
                         full);
  }
  const std::uint32_t target =
      ptx::shared_address(shared.rows(stage.slot)) + swizzle_128b(thread / 8, thread % 8);
  const int tile_rows = tile.rows;  // once: a copy in flight counts as a write to shared memory
  // Streaming tiles leave out copies of the repeated row: at one token every multiprocessor asks
  // for the same line.
  const int first_row = Traits::kStreams ? thread / 8 : 0;
#pragma unroll
  for (int panel = 0; panel < Traits::kPanels; ++panel) {
    const bool inside = depth + panel * kDepth + thread % 8 * 8 < params.depth;
    const int offset = Offset * Traits::kPanels + panel * kRowBytes;
#pragma unroll
    for (int i = 0; i < rows.kCount; ++i) {
      if (first_row + i * rows.kStep < tile_rows) {
        const std::uint32_t chunk =
            target + panel * Traits::kRowsBytes + i * rows.kStep * kRowBytes;
        if constexpr (Checked) {
          ptx::cp_async_16_or_zero(chunk, rows.pointers[i] + offset,
                                   inside && !(rows.missing >> i & 1));
        } else {
          ptx::cp_async_16(chunk, rows.pointers[i] + offset);
        }
      }
    }
  }
  ptx::cp_async_mbarrier_arrive_noinc(full);
  if constexpr (Traits::kTabled) {
    if (thread / kWarpSize == writer) {
      scales.write(params, shared.scale_table(stage.slot), 0, full);
      scales.fetch(params, depth / kDepth + kWarpgroupWarps, 0);
    }
  }
  stage.advance();
}

/// The stages of the low-rank part of a gathered tile.
template <typename Traits>
__device__ __forceinline__ void load_gathered_low_rank(const RowGemmParams& params,
                                                       const RowGemmShared<Traits>& shared,
                                                       const Tile& tile,
                                                       PipelineState<Traits::kStages>& stage) {
#pragma unroll 1
  for (int depth = 0; depth < low_depth<Traits>(params); depth += Traits::kLowDepth) {
    auto& ring = shared.rings().stage;
    ring.wait_empty(stage);
    if (threadIdx.x == 0) load_low_rank(params, shared, tile, depth, stage.slot);
    ptx::mbarrier_arrive(&ring.full[stage.slot]);  // for the copies that it has none of
    if (Traits::kTabled && threadIdx.x < kWarpSize) {
      ptx::mbarrier_arrive(&ring.full[stage.slot]);  // and the scales
    }
    stage.advance();
  }
}

/// Every stage of one gathered tile. Address arithmetic between the copies would cost tensor-core
/// time (it shares the issue slots), so full stages go in groups with immediate offsets.
template <typename Traits>
__device__ __forceinline__ void load_gathered_tile(const RowGemmParams& params,
                                                   const RowGemmShared<Traits>& shared,
                                                   const Tile& tile, GatheredRows<Traits>& rows,
                                                   GatheredScales<Traits>& scales,
                                                   PipelineState<Traits::kStages>& stage) {
  constexpr int kGroup = 4;
  constexpr int kStep = Traits::kStageDepth;
  int depth = 0;
  if (!__any_sync(kFullMask, rows.missing != 0)) {
#pragma unroll 1
    for (; depth + kGroup * kStep <= params.depth; depth += kGroup * kStep) {
      load_gathered_stage<Traits, false>(params, shared, tile, depth, rows, scales, 0, stage);
      load_gathered_stage<Traits, false, kRowBytes>(params, shared, tile, depth + kStep, rows,
                                                    scales, 1, stage);
      load_gathered_stage<Traits, false, 2 * kRowBytes>(params, shared, tile, depth + 2 * kStep,
                                                        rows, scales, 2, stage);
      load_gathered_stage<Traits, false, 3 * kRowBytes>(params, shared, tile, depth + 3 * kStep,
                                                        rows, scales, 3, stage);
      rows.advance(kGroup * Traits::kPanels);
    }
  }
#pragma unroll 1
  for (; depth < params.depth; depth += kStep) {
    load_gathered_stage<Traits, true>(params, shared, tile, depth, rows, scales,
                                      depth / kDepth % kWarpgroupWarps, stage);
    rows.advance(Traits::kPanels);
  }
  load_gathered_low_rank(params, shared, tile, stage);
}

/// Rows gathered by cp.async, all four producer warps; warp 0 also schedules and loads weights.
template <typename Traits, typename WriteInfo>
__device__ __forceinline__ void load_gathered(const RowGemmParams& params,
                                              const RowGemmShared<Traits>& shared,
                                              const WriteInfo& write_info) {
  const int thread = threadIdx.x;  // of the first warpgroup
  const bool scheduler = thread < kWarpSize;
  if (scheduler) ptx::griddepcontrol_launch_dependents();
  TileQueue queue(params.counter, scheduler ? shared.starts()[params.experts].tile : 0);
  TileDecoder decoder(shared.starts(), params.experts);
  auto& rings = shared.rings();
  PipelineState<Traits::kStages> stage;
  RowSources<Traits> rows;
  GatheredScales<Traits> scales;
  int position = 0;
  for (;; ++position) {
    const auto slot = PipelineState<kTileSlots>::at(position);
    if (scheduler) {
      if (queue.done()) break;
      publish_tile(shared, find_tile(params, shared, decoder, queue.current()), slot);
    } else {
      rings.tile.wait_full(slot);
      if (shared.tiles()[slot.slot].rows == 0) break;
    }
    const Tile& tile = shared.tiles()[slot.slot];  // not copied: registers are short here
    if constexpr (Traits::kQuantised) {
      if (scheduler) prefetch_scales<Traits>(params, tile);
    }
    if constexpr (Traits::kTabled) {
      scales.begin(params, tile);
      scales.fetch(params, thread / kWarpSize, 0);
    }
    write_info(tile, slot.slot);
    rows.locate(params, tile, thread);
    if constexpr (Traits::kTf32) {  // found where the kernel is instantiated
      load_rounded_tile(params, shared, tile, rows, stage);
    } else {
      load_gathered_tile<Traits>(params, shared, tile, rows, scales, stage);
    }
    if (scheduler) {
      queue.advance();
    } else {
      ptx::mbarrier_arrive(&rings.tile.empty[slot.slot]);
    }
  }
  if (scheduler) {
    publish_end(shared, PipelineState<kTileSlots>::at(position));
    if (thread == 0) queue.leave();
  }
}

}  // namespace moegemm::cuda::sm90
