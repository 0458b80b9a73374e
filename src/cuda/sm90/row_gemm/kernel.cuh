#pragma once

#include <climits>

#include "cuda/device/segment_scan.cuh"
#include "cuda/device/unnamed_rows.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/sm90/row_gemm/activate.cuh"
#include "cuda/sm90/row_gemm/load.cuh"
#include "cuda/sm90/row_gemm/mma.cuh"
#include "cuda/sm90/row_gemm/row_info.cuh"
#include "cuda/sm90/row_gemm/store.cuh"

// clang-format off
/// Forward and dX on Hopper: out[rows of expert e] = rows W_e^T (or W_e), all experts in one launch.
///
/// | warps         | role                      | registers  | waits for               | signals               |
/// |---------------|---------------------------|------------|-------------------------|-----------------------|
/// | 0             | scheduler, TMA loads      | 40 or 56   | stage empty, tile empty | stage full, tile full |
/// | 0-3, gathered | cp.async of gathered rows | 56         | tile full, stage empty  | stage full, info full |
/// | 1-3, in order | row info for the store,   | 40         | tile full               | info full             |
/// |               | zeros for unnamed rows    |            |                         |                       |
/// | 2-3, tabled   | tables of scales instead  | 88         | tile full, stage empty  | stage full            |
/// | 4-7 and 8-11  | consumers: wgmma, store   | 232 or 224 | tile, stage, info full  | stage, tile empty     |
/// Streaming tiles, for few rows, leave every thread its 168 registers.
// clang-format on
namespace moegemm::cuda::sm90 {

/// All threads of a block, wherever each warp is in the code.
__device__ __forceinline__ void meet_block() { ptx::bar_sync(0, kThreads); }

/// The product of a consumer's next tile.
template <typename Traits, int N>
__device__ __forceinline__ void accumulate_tile(const RowGemmParams& params,
                                                const RowGemmShared<Traits>& shared, int consumer,
                                                int tile_slot,
                                                PipelineState<Traits::kStages>& stage,
                                                float (&d)[Traits::kBlocks][N / 2]) {
  if constexpr (Traits::kQuantised) {  // found where the kernel is instantiated
    accumulate_decoded(params, shared, consumer, tile_slot, stage, d);
  } else {
    // Pingpong: a main loop starts only when the other one has issued its last step, else a stage's
    // parity could be read two laps ahead.
    if constexpr (Traits::kPingpong) {
      ptx::bar_sync(barrier_id(NamedBarrier::kMainloop, consumer), kConsumers * kWarpgroupThreads);
    }
    constexpr bool kTurned = Traits::kTf32 && !Traits::kDepthMajor;
    if constexpr (kTurned) {  // found likewise
      accumulate_turned(d, shared, consumer, params.blocks, stage);
    } else {
      multiply_tile<Traits, N>(d, shared, consumer, params.blocks, stage);
    }
    if constexpr (Traits::kPingpong) {
      ptx::bar_arrive(barrier_id(NamedBarrier::kMainloop, consumer ^ 1),
                      kConsumers * kWarpgroupThreads);
    }
    if constexpr (!kTurned) finish_tile<Traits, N>(d, shared, stage);
  }
}

/// Opaque: what follows from the number of experts must not wait in registers, which are short.
template <typename Traits>
__device__ __forceinline__ RowGemmShared<Traits> shared_now(const RowGemmParams& params,
                                                            const RowGemmShared<Traits>& shared) {
  return {shared.base, ptx::opaque(params.experts)};
}

/// A tile's slot and phase in one register instead of two: the main loop has none to spare.
__device__ __forceinline__ unsigned place_of(const PipelineState<kTileSlots>& slot) {
  return ptx::opaque(static_cast<unsigned>(slot.slot) | slot.phase << 8);
}
__device__ __forceinline__ PipelineState<kTileSlots> slot_at(unsigned place) {
  return {static_cast<int>(place & 0xff), place >> 8};
}

template <int Blocks, int Count>
__device__ __forceinline__ void clear(float (&d)[Blocks][Count]) {
#pragma unroll
  for (auto& block : d) {
#pragma unroll
    for (float& value : block) value = 0;
  }
}

/// One tile of a consumer with N wgmma columns: its product, what follows that in fp32, and its
/// stores, unless all N share them (kCommonStores): then it leaves its rounded results. A rehearsal
/// has neither rows nor product: see consume.
template <typename Traits, int N>
__device__ __forceinline__ void consume_tile(const RowGemmParams& params,
                                             const RowGemmShared<Traits>& shared, int consumer,
                                             PipelineState<Traits::kStages>& stage,
                                             RoundedTile<Traits>& rounded, unsigned place,
                                             bool rehearsal) {
  float d[Traits::kBlocks][N / 2];
  if (Traits::kStreams && rehearsal) {
    clear(d);
  } else {
    accumulate_tile<Traits, N>(params, shared, consumer, slot_at(place).slot, stage, d);
  }
  if constexpr (!Traits::kActivated) {
    const PipelineState<kTileSlots> slot = slot_at(ptx::opaque(place));
    const RowGemmShared<Traits> after = shared_now(params, shared);
    const auto finish = [&](const Tile& tile) {
      if constexpr (Traits::kTf32) {
        store_tf32_results(params, after, tile, slot.slot, d);
      } else {
        finish_results<Traits, N>(params, after, tile, slot.slot, d);
      }
      if constexpr (!Traits::kCommonStores && !Traits::kTf32) {
        if (!params.rounds) return;
        store_rows<Traits, N>(params, after, Tile(tile), slot.slot,
                              [&](int m, int i) { return rounded_pair<Traits, N>(d[m], i); });
      }
    };
    if ((params.scatter || params.multiply) && !(Traits::kStreams && rehearsal)) {
      ptx::mbarrier_wait(&after.rings().info_full[slot.slot], slot.phase);
    }
    if constexpr (Traits::kStreams) {  // one copy of the code, else a rehearsal is in vain
      Tile tile;
      if (!rehearsal) tile = after.tiles()[slot.slot];
      finish(tile);
    } else {
      finish(after.tiles()[slot.slot]);
    }
  }
  if constexpr (Traits::kCommonStores) rounded.template take<N>(d);
}

/// Chooses the compiled N at run time: a tile pays for its rows, not for the largest tile.
template <typename Traits, int N, typename... Args>
__device__ __forceinline__ void consume_tile_of(int n, Args&... args) {
  if constexpr (N > Traits::kMinColumns) {
    if (n <= N - Traits::kGranule) {
      consume_tile_of<Traits, N - Traits::kGranule>(n, args...);
      return;
    }
  }
  consume_tile<Traits, N>(args...);
}

/// The same for streaming tiles, whose multiplications are hidden: fewer N, the lowest found first.
template <typename Traits, int N, typename... Args>
__device__ __forceinline__ void consume_streamed_tile_of(int n, Args&... args) {
  if constexpr (N < Traits::kRows) {
    if (n > N) {
      constexpr int kNext = N < 16 ? 2 * N : N + 16;
      consume_streamed_tile_of<Traits, kNext>(n, args...);
      return;
    }
  }
  consume_tile<Traits, N>(args...);
}

/// All tiles of a consumer. Instructions that nobody has executed lately come from memory, and
/// after the weights in flight they wait for microseconds. So a streaming tile's consumers
/// rehearse while the sizes are read: the first round of the loop is a tile without rows or
/// product.
template <typename Traits>
__device__ __forceinline__ void consume(const RowGemmParams& params,
                                        const RowGemmShared<Traits>& shared, int consumer) {
  auto& ring = shared.rings().tile;
  PipelineState<Traits::kStages> stage;
  PipelineState<kTileSlots> slot;
  const int blocks = params.blocks;
  if constexpr (Traits::kPingpong) {
    if (consumer == 1) {
      slot.advance();
      stage.advance(blocks);
      ptx::bar_arrive(barrier_id(NamedBarrier::kMainloop, 0), kConsumers * kWarpgroupThreads);
    }
  }
  bool rehearsal = Traits::kStreams;
  while (true) {
    Tile tile;
    if (!rehearsal) {
      ring.wait_full(slot);
      tile = shared.tiles()[slot.slot];
    }
    const int rows = ptx::uniform(tile.rows);
    if (rows == 0 && !rehearsal) {
      // Shared memory must outlive what is copied from it.
      if (Traits::kStoresLater && params.stores_later) ptx::cp_async_bulk_wait_group_read<0>();
      return;
    }
    const int columns = padded_rows<Traits>(rows);
    RoundedTile<Traits> rounded;
    const unsigned place = place_of(slot);
    if constexpr (Traits::kStreams) {
      consume_streamed_tile_of<Traits, Traits::kMinColumns>(columns, params, shared, consumer,
                                                            stage, rounded, place, rehearsal);
    } else {
      consume_tile_of<Traits, Traits::kRows>(columns, params, shared, consumer, stage, rounded,
                                             place, rehearsal);
    }
    slot = slot_at(ptx::opaque(place));
    if constexpr (Traits::kActivated) {
      store_activated<Traits>(params, shared, slot.slot, rounded, rehearsal);
    } else if constexpr (Traits::kCommonStores) {
      if (Traits::kStoresLater && params.stores_later) {
        if constexpr (Traits::kStoresLater) {
          store_later<Traits>(params, shared, Tile(shared.tiles()[slot.slot]), rounded);
        }
      } else if (params.rounds) {
        store_rows<Traits, Traits::kRows>(params, shared, Tile(shared.tiles()[slot.slot]),
                                          slot.slot,
                                          [&](int m, int i) { return rounded.pairs[m][i]; });
      }
    }
    if (rehearsal) {
      rehearsal = false;
      meet_block();
      continue;
    }
    ptx::mbarrier_arrive(&ring.empty[slot.slot]);
    slot.advance();
    if constexpr (Traits::kPingpong) {
      slot.advance();
      stage.advance(blocks);
    }
  }
}

/// The segments' starts, by the first four warps, and their shifts where they do not follow one
/// another. Their scratch is where tiles will be.
template <typename Traits>
__device__ __forceinline__ void scan(const RowGemmParams& params,
                                     const RowGemmShared<Traits>& shared, int column_tiles) {
  static_assert(4 * sizeof(SegmentStart) <= kTileSlots * sizeof(Tile));
  constexpr int kBarrier = static_cast<int>(NamedBarrier::kScan);
  const Placement& placement = params.placement;
  const int first = threadIdx.x;
  // On its way together with the sizes.
  const int begin = placement.given() && first < params.experts ? placement.begin(first) : 0;
  scan_segments<4>(params, TileStarts{shared.starts(), Traits::kRows, column_tiles},
                   reinterpret_cast<SegmentStart*>(shared.tiles()), kBarrier);
  if (!placement.given()) return;
  ptx::bar_sync(kBarrier, kWarpgroupThreads);
#pragma unroll 1
  for (int expert = first; expert < params.experts; expert += kWarpgroupThreads) {
    shared.shift(params.shifts, expert) =
        (expert == first ? begin : placement.begin(expert)) - shared.starts()[expert].row;
  }
}

template <typename Traits>
__device__ __forceinline__ void prepare_copies(const RowGemmParams& params,
                                               const RowGemmShared<Traits>& shared, bool row_info) {
  ptx::prefetch_tensormap(&params.weights_map);
  if (params.low_rank > 0) {
    ptx::prefetch_tensormap(&params.low_weights_map);
    ptx::prefetch_tensormap(&params.low_rows_map);
  }
  if constexpr (!Traits::kGathered) {
    for (int i = 0; i < Traits::kBoxes; ++i) ptx::prefetch_tensormap(&params.rows_maps[i]);
  }
  constexpr int kTileConsumers = Traits::kPingpong ? 1 : kConsumers;
  auto& rings = shared.rings();
  rings.stage.init(
      (Traits::kGathered ? 1 + kWarpgroupThreads : 1) + (Traits::kTabled ? kWarpSize : 0),
      kTileConsumers * 4 * (Traits::kQuantised ? kWarpSize : 1));
  constexpr int kInfoThreads = Traits::kInfoWarps * kWarpSize;
  rings.tile.init(1, kTileConsumers * kWarpgroupThreads +
                         (Traits::kGathered || row_info ? kInfoThreads : 0) +
                         Traits::kScaleWarps * kWarpSize);
  for (auto& barrier : rings.info_full) {
    ptx::mbarrier_init(&barrier, Traits::kGathered ? kWarpgroupThreads : kInfoThreads);
  }
  ptx::fence_mbarrier_init();
}

/// What UnnamedRows asks.
template <typename Traits>
struct ScatteredOutput {
  const RowGemmParams& params;
  const RowGemmShared<Traits>& shared;

  __device__ __forceinline__ const IndexArray& indices() const { return params.gather_indices; }
  __device__ __forceinline__ int rows() const { return params.zeroed_rows; }
  __device__ __forceinline__ int routed() const { return shared.starts()[params.experts].row; }
  __device__ __forceinline__ unsigned* words() const { return shared.named_rows(); }
  __device__ __forceinline__ int word_count() const { return params.named_words; }
  __device__ __forceinline__ void zero(int row) const {
    zero_row<typename Traits::Element>(params, row);
  }
};

/// Row info of every tile and, where results are scattered, zeros for the rows that no position
/// names. These warps wait most of the time: they read some of the indices after each tile.
template <typename Traits>
__device__ __forceinline__ void describe_rows(const RowGemmParams& params,
                                              const RowGemmShared<Traits>& shared) {
  if (Traits::kActivated || !params.scatter) {
    row_info_warps(params, shared, [] {});
    return;
  }
  using Output = ScatteredOutput<Traits>;
  const Output output = {params, shared};
  constexpr int kBarrier = static_cast<int>(NamedBarrier::kNamedRows);
  constexpr int kLoads = 9 / Traits::kInfoWarps;  // of all warps together as many
  UnnamedRows<kWarpSize, Traits::kInfoWarps * kWarpSize, kBarrier, kLoads, Output> unnamed(output);
  const int steps = unnamed.steps_per_tile(shared.starts()[params.experts].tile);
  row_info_warps(params, shared, [&] { unnamed.advance(steps); });
  unnamed.advance(INT_MAX);
}

template <typename Traits>
__device__ __forceinline__ void produce(const RowGemmParams& params,
                                        const RowGemmShared<Traits>& shared, int warp,
                                        bool row_info) {
  if constexpr (Traits::kGathered) {
    load_gathered<Traits>(params, shared, [&](const Tile& tile, int slot) {
      if (params.multiply) {
        write_row_info<kWarpgroupThreads>(params, shared_now(params, shared), tile, slot,
                                          threadIdx.x);
      }
    });
  } else if (warp == 0) {
    load_in_order<Traits>(params, shared);
  } else if (Traits::kTabled && warp > Traits::kInfoWarps) {
    if constexpr (Traits::kTabled) {  // found as above
      write_scale_tables(params, shared, warp - Traits::kInfoWarps - 1);
    }
  } else if (row_info) {
    describe_rows(params, shared);
  }
  // Here, since consumers still have tiles to multiply, and racecheck would report a read of the
  // starts by them: it does not follow the block's barrier after one of these four warps only.
  if (Traits::kGathered || !params.scatter) {
    constexpr auto kColumns =
        Traits::kActivated ? &RowGemmParams::columns : &RowGemmParams::features;
    if constexpr (Traits::kStreams) ptx::griddepcontrol_wait();
    const int routed = shared.starts()[params.experts].row;
    zero_padding_rows<kWarpgroupWarps>(params, routed, threadIdx.x / kWarpSize, [&](long long row) {
      zero_row<typename Traits::Element, kColumns>(params, static_cast<int>(row));
    });
  }
}

template <typename Traits>
__global__ void __launch_bounds__(kThreads, 1)
    row_gemm_kernel(const __grid_constant__ RowGemmParams params) {
  extern __shared__ __align__(1024) std::byte dynamic_shared[];
  const bool row_info = params.scatter || params.multiply;
  const RowGemmShared<Traits> shared = {dynamic_shared, params.experts};
  if constexpr (Traits::kQuantised) prepare_decoding(shared);
  const int warp = threadIdx.x / kWarpSize;
  const int column_tiles = ceil_div(params.features, Traits::kFeatures);
  if constexpr (Traits::kStreams) {  // few accumulators: every thread keeps its 168 registers
    if (warp < 4) {
      if (Traits::kGathered || !params.rows_pending) ptx::griddepcontrol_wait();
      scan(params, shared, column_tiles);
      meet_block();
      produce<Traits>(params, shared, warp, row_info);
    } else {
      if (threadIdx.x == kWarpgroupThreads) prepare_copies<Traits>(params, shared, row_info);
      __syncwarp();
      consume<Traits>(params, shared, warp / 4 - 1);
    }
  } else {
    if (warp < 4) {
      ptx::griddepcontrol_wait();
      scan(params, shared, column_tiles);
    } else if (threadIdx.x == kWarpgroupThreads) {
      prepare_copies<Traits>(params, shared, row_info);
    }
    __syncthreads();
    if (warp < 4) {
      ptx::setmaxnreg_dec<Traits::kProducerRegisters>();
      produce<Traits>(params, shared, warp, row_info);
    } else {
      ptx::setmaxnreg_inc<Traits::kConsumerRegisters>();
      consume<Traits>(params, shared, warp / 4 - 1);
    }
  }
}

template <typename Traits>
const void* row_gemm_address() {
  return reinterpret_cast<const void*>(&row_gemm_kernel<Traits>);
}

template <RowGemm Kernel, DType D>
KernelFunctions row_gemm_functions() {
  KernelFunctions functions;
  if constexpr (Kernel.loads != RowLoads::kGathered) {
    functions.plain = row_gemm_address<RowGemmTraits<Kernel, D, false>>();
    if constexpr (!Kernel.activated && !Kernel.adds_bias()) {
      functions.biased = row_gemm_address<RowGemmTraits<Kernel, D, false, true>>();
    }
  }
  if constexpr (Kernel.loads != RowLoads::kInOrder) {
    functions.gathered = row_gemm_address<RowGemmTraits<Kernel, D, true>>();
  }
  return functions;
}

}  // namespace moegemm::cuda::sm90
