#pragma once

#include "cuda/sm90/row_gemm/load.cuh"
#include "cuda/sm90/row_gemm/mma.cuh"
#include "cuda/sm90/row_gemm/store.cuh"

// clang-format off
/// Forward and dX on Hopper: out[rows of expert e] = rows W_e^T (or W_e), all experts in one launch.
///
/// | warps         | role                      | registers  | waits for               | signals               |
/// |---------------|---------------------------|------------|-------------------------|-----------------------|
/// | 0             | scheduler, TMA loads      | 40 or 56   | stage empty, tile empty | stage full, tile full |
/// | 0-3, gathered | cp.async of gathered rows | 56         | tile full, stage empty  | stage full, info full |
/// | 1-3, in order | row info for the store    | 40         | tile full               | info full             |
/// | 4-7 and 8-11  | consumers: wgmma, store   | 232 or 224 | tile, stage, info full  | stage, tile empty     |
// clang-format on
namespace moegemm::cuda::sm90 {

/// Activated tiles only: their instances include activate.cuh.
template <typename TileT>
struct RoundedTile;
template <typename T, typename TileT>
__device__ void store_activated(const RowGemmParams& params, const RowGemmShared<TileT>& shared,
                                int slot, const RoundedTile<TileT>& rounded);

/// The product of a consumer's next tile.
template <typename T, int N, typename TileT, ptx::Major WeightMajor, bool Gathered>
__device__ __forceinline__ void accumulate_tile(const RowGemmParams& params,
                                                const RowGemmShared<TileT>& shared, int consumer,
                                                PipelineState<TileT::kStages>& stage,
                                                float (&d)[TileT::kBlocks][N / 2]) {
  // Pingpong: a main loop starts only when the other one has issued its last step, else a stage's
  // parity could be read two laps ahead.
  if constexpr (TileT::kPingpong) {
    ptx::bar_sync(barrier_id(NamedBarrier::kMainloop, consumer), kConsumers * kWarpgroupThreads);
  }
  multiply_tile<T, N, TileT, WeightMajor, Gathered>(d, shared, consumer, depth_blocks(params),
                                                    stage);
  if constexpr (TileT::kPingpong) {
    ptx::bar_arrive(barrier_id(NamedBarrier::kMainloop, consumer ^ 1),
                    kConsumers * kWarpgroupThreads);
  }
  finish_tile<N, TileT>(d, shared, stage);
}

/// One tile of a consumer with N wgmma columns.
template <typename T, int N, typename TileT, ptx::Major WeightMajor, bool Gathered>
__device__ __forceinline__ void consume_tile(const RowGemmParams& params,
                                             const RowGemmShared<TileT>& shared, const Tile& tile,
                                             const PipelineState<kTileSlots>& slot, int consumer,
                                             PipelineState<TileT::kStages>& stage) {
  float d[TileT::kBlocks][N / 2];
  accumulate_tile<T, N, TileT, WeightMajor, Gathered>(params, shared, consumer, stage, d);
  if (params.scatter || params.multiply) {
    ptx::mbarrier_wait(&shared.rings().info_full[slot.slot], slot.phase);
  }
  store_tile<T, N, TileT>(params, shared, tile, slot.slot, consumer, d);
}

/// One tile of a consumer of an activated kernel, up to its rounded results.
template <typename T, int N, typename TileT, ptx::Major WeightMajor, bool Gathered>
__device__ __forceinline__ void consume_tile(const RowGemmParams& params,
                                             const RowGemmShared<TileT>& shared, int consumer,
                                             PipelineState<TileT::kStages>& stage,
                                             RoundedTile<TileT>& rounded) {
  float d[TileT::kBlocks][N / 2];
  accumulate_tile<T, N, TileT, WeightMajor, Gathered>(params, shared, consumer, stage, d);
  rounded.template take<T, N>(d);
}

/// Chooses the compiled N at run time: a tile pays for its rows, not for the largest tile.
template <typename T, int N, typename TileT, ptx::Major WeightMajor, bool Gathered,
          typename... Args>
__device__ __forceinline__ void consume_tile_of(int n, Args&... args) {
  if constexpr (N > TileT::kMinColumns) {
    if (n <= N - TileT::kGranule) {
      consume_tile_of<T, N - TileT::kGranule, TileT, WeightMajor, Gathered>(n, args...);
      return;
    }
  }
  consume_tile<T, N, TileT, WeightMajor, Gathered>(args...);
}

template <typename T, typename TileT, ptx::Major WeightMajor, bool Gathered>
__device__ __forceinline__ void consume(const RowGemmParams& params,
                                        const RowGemmShared<TileT>& shared, int consumer) {
  constexpr auto kColumns = TileT::kActivated ? &RowGemmParams::columns : &RowGemmParams::features;
  zero_padding_rows<T, kColumns>(params, shared.starts()[params.experts].row);
  auto& ring = shared.rings().tile;
  PipelineState<TileT::kStages> stage;
  PipelineState<kTileSlots> slot;
  const int blocks = depth_blocks(params);
  if constexpr (TileT::kPingpong) {
    if (consumer == 1) {
      slot.advance();
      stage.advance(blocks);
      ptx::bar_arrive(barrier_id(NamedBarrier::kMainloop, 0), kConsumers * kWarpgroupThreads);
    }
  }
  while (true) {
    ring.wait_full(slot);
    const Tile tile = shared.tiles()[slot.slot];
    const int rows = ptx::uniform(tile.rows);
    if (rows == 0) return;
    if constexpr (TileT::kActivated) {
      RoundedTile<TileT> rounded;
      // One register instead of two through the main loop, which has none to spare.
      const unsigned parked = ptx::opaque(static_cast<unsigned>(slot.slot) | slot.phase << 8);
      consume_tile_of<T, TileT::kRows, TileT, WeightMajor, Gathered>(
          padded_rows<TileT>(rows), params, shared, consumer, stage, rounded);
      slot = {static_cast<int>(parked & 0xff), parked >> 8};
      store_activated<T>(params, shared, slot.slot, rounded);
    } else {
      consume_tile_of<T, TileT::kRows, TileT, WeightMajor, Gathered>(
          padded_rows<TileT>(rows), params, shared, tile, slot, consumer, stage);
    }
    ptx::mbarrier_arrive(&ring.empty[slot.slot]);
    slot.advance();
    if constexpr (TileT::kPingpong) {
      slot.advance();
      stage.advance(blocks);
    }
  }
}

template <typename T, typename TileT, ptx::Major WeightMajor, bool Gathered>
__global__ void __launch_bounds__((1 + kConsumers) * kWarpgroupThreads, 1)
    row_gemm_kernel(const __grid_constant__ RowGemmParams params) {
  // The pool is 3 x 168 registers per thread triple: 56 + 2 x 224 and 40 + 2 x 232 both use it up.
  constexpr int kProducerRegisters = Gathered ? 56 : 40;
  constexpr int kConsumerRegisters = Gathered ? 224 : 232;
  extern __shared__ __align__(1024) std::byte dynamic_shared[];
  const bool row_info = params.scatter || params.multiply;
  const RowGemmShared<TileT> shared = {dynamic_shared, params.experts};
  const int warp = threadIdx.x / kWarpSize;
  if (warp == 0) {
    scan_segments(params.m_sizes, params.experts, params.total_rows, TileT::kRows,
                  &shared.starts()->row, &shared.starts()->tile,
                  ceil_div(params.features, TileT::kFeatures), /*stride=*/2);
  } else if (threadIdx.x == kWarpSize) {
    ptx::prefetch_tensormap(&params.weights_map);
    if constexpr (!Gathered) {
      ptx::prefetch_tensormap(&params.rows_map);
      ptx::prefetch_tensormap(&params.half_rows_map);
    }
    constexpr int kTileConsumers = TileT::kPingpong ? 1 : kConsumers;
    auto& rings = shared.rings();
    rings.stage.init(Gathered ? 1 + kWarpgroupThreads : 1, kTileConsumers * 4);
    rings.tile.init(1, kTileConsumers * kWarpgroupThreads +
                           (Gathered || row_info ? kInfoWarps * kWarpSize : 0));
    for (auto& barrier : rings.info_full) {
      ptx::mbarrier_init(&barrier, Gathered ? kWarpgroupThreads : kInfoWarps * kWarpSize);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warp < 4) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if constexpr (Gathered) {
      load_gathered<TileT, WeightMajor>(params, shared, [&](const Tile& tile, int slot) {
        if (params.multiply) {
          write_row_info<T, kWarpgroupThreads>(params, shared, tile, slot, threadIdx.x);
        }
      });
    } else if (warp == 0) {
      load_in_order<TileT, WeightMajor>(params, shared);
    } else if (row_info) {
      row_info_warps<T>(params, shared);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume<T, TileT, WeightMajor, Gathered>(params, shared, warp / 4 - 1);
  }
}

}  // namespace moegemm::cuda::sm90
