#pragma once

#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/weight_gemm/load.cuh"
#include "cuda/sm90/weight_gemm/mma.cuh"
#include "cuda/sm90/weight_gemm/schedule.cuh"
#include "cuda/sm90/weight_gemm/store.cuh"

// clang-format off
/// dW_e = dY_e^T X_e for all experts in one persistent launch.
///
/// Both operands are read as they lie in memory: rows of the contraction, columns contiguous, which
/// is wgmma's MN-major form. A CTA of 384 threads:
///
/// | warps | role     | registers | waits for                           | signals                  |
/// |-------|----------|-----------|-------------------------------------|--------------------------|
/// | 0-2   | load     | 56        | tiles full, loads empty             | loads full, tiles empty  |
/// | 3     | schedule | 56        | tiles empty                         | tiles full, with whether |
/// |       |          |           |                                     | rows are absent          |
/// | 4-11  | multiply | 224       | tiles full, loads full, its staging | loads empty, tiles empty |
/// |       | + store  |           | buffer (one per warpgroup)          |                          |
///
/// Each multiplying warpgroup has two blocks of 64 A columns by all B columns of the tile. The
/// store of a tile runs under multiplications: block 0 is stored while the last rows of block 1
/// multiply, and block 1, rounded and kept in registers, while the first rows of the next tile do.
// clang-format on
namespace moegemm::cuda::sm90 {

/// Whether an index of a segment is out of range; by one warp.
__device__ __forceinline__ bool has_absent_rows(const WeightGemmParams& params,
                                                const WeightTile& tile) {
  constexpr int kBatch = 16;  // loads in flight: the first tile waits for them
  bool absent = false;
#pragma unroll 1
  for (int first = threadIdx.x % kWarpSize; first < tile.rows; first += kBatch * kWarpSize) {
    IndexArray::Fetched fetched[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      fetched[i] =
          params.gather_indices.fetch(tile.row + min(first + i * kWarpSize, tile.rows - 1));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) absent |= fetched[i].below(params.flat_rows) < 0;
  }
  return __any_sync(kFullMask, absent);
}

template <typename Traits>
__device__ __forceinline__ void schedule_tiles(const WeightGemmParams& params,
                                               WeightGemmShared<Traits>& shared) {
  TileScheduler<Traits, WeightGemmParams> tiles(params, shared);
  int looked_at = -1;  // the expert whose indices were last looked at, and what was found
  bool absent = false;
  for (; !tiles.done(); tiles.advance()) {
    WeightGemmTile tile = {tiles.current()};
    if (params.gather_indices.data && tile.expert != looked_at) {
      looked_at = tile.expert;
      absent = has_absent_rows(params, tile);
    }
    tile.has_absent_rows = absent;
    if (!tiles.stays(tile)) tiles.publish(tile);
  }
  tiles.end();
}

/// 16-bit output: the stores of both blocks run under multiplications.
template <typename Traits>
__device__ __forceinline__ void multiply_and_store(const WeightGemmParams& params,
                                                   WeightGemmShared<Traits>& shared) {
  const int group = ptx::uniform(threadIdx.x / kWarpgroupThreads - 1);
  WeightStore<Traits> store(params, shared, group);
  StageReader<Traits> loads(shared, group);
  TileReader<Traits> tiles(shared);
  std::uint32_t packed[Traits::kBCols / 4] = {};  // block 1 of `last`, rounded, not yet stored
  WeightGemmTile last;
  const auto store_last = [&] {
    if (last.expert >= 0) store.store_packed(packed, last, 1);
  };
  for (WeightGemmTile tile = tiles.next(); tile.expert >= 0; tile = tiles.next()) {
    if (tile.a_col + group * 2 * kSlabCols >= params.a_cols) {
      store_last();
      last.expert = -1;
      skip_tile(loads, stages_of(tile.rows, Traits::kRows));
      continue;
    }
    with_tile_cols<Traits>(params.b_cols - tile.b_col, [&](auto cols) {
      float acc0[cols / 2];
      float acc1[cols / 2];
      const int slot = multiply_tile<cols>(loads, tile.rows, acc0, acc1, store_last);
      wait_for_accumulators<1>(acc0);
      store.pack(acc0, packed);
      store.store_packed(packed, tile, 0);
      wait_for_accumulators<0>(acc1);
      loads.release(slot);
      store.pack(acc1, packed);
    });
    last = tile;
  }
  store_last();
  store.finish();
}

/// fp32 output: there are no registers to keep a block in, so nothing is deferred.
template <typename Traits>
__device__ __forceinline__ void multiply_and_store_float(const WeightGemmParams& params,
                                                         WeightGemmShared<Traits>& shared) {
  const int group = ptx::uniform(threadIdx.x / kWarpgroupThreads - 1);
  WeightStore<Traits> store(params, shared, group);
  StageReader<Traits> loads(shared, group);
  TileReader<Traits> tiles(shared);
  for (WeightGemmTile tile = tiles.next(); tile.expert >= 0; tile = tiles.next()) {
    if (tile.a_col + group * 2 * kSlabCols >= params.a_cols) {
      skip_tile(loads, stages_of(tile.rows, Traits::kRows));
      continue;
    }
    float acc0[Traits::kBCols / 2];
    float acc1[Traits::kBCols / 2];
    const int slot = multiply_tile<Traits::kBCols>(loads, tile.rows, acc0, acc1,
                                                   [&] { store.prefetch_old(tile); });
    wait_for_accumulators<0>(acc0);
    wait_for_accumulators<0>(acc1);
    loads.release(slot);
    store.store_float(acc0, tile, 0);
    store.store_float(acc1, tile, 1);
  }
  store.finish();
}

template <typename Traits>
__global__ void __launch_bounds__(kThreads, 1)
    weight_gemm_kernel(const __grid_constant__ WeightGemmParams params) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  auto& shared = *reinterpret_cast<WeightGemmShared<Traits>*>(dynamic_shared);
  const int warp = ptx::uniform(threadIdx.x / kWarpSize);

  if (threadIdx.x == 0) {
    shared.loads.init(params.gathered ? 1 + kWarpSize : 1, kConsumerWarps);
    shared.tile_ring.init(1, (kConsumerWarps + kLoadWarps) * kWarpSize);
    for (auto& barrier : shared.old_full) ptx::mbarrier_init(&barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&params.a_map);
    ptx::prefetch_tensormap(&params.b_map);
    ptx::prefetch_tensormap(&params.out_map);
  }
  __syncthreads();

  if (warp < kLoadWarps + 1) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp < kLoadWarps) {
      load_tiles(params, shared, warp);
    } else {
      schedule_tiles(params, shared);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    if constexpr (Traits::kFloatOutput) {
      multiply_and_store_float(params, shared);
    } else {
      multiply_and_store(params, shared);
    }
  }
}

template <WeightGemm Kernel, DType D>
KernelFunctions weight_gemm_functions() {
  return {
      .plain =
          reinterpret_cast<const void*>(&weight_gemm_kernel<WeightGemmTraits<Kernel, D, false>>),
      .fp32_output =
          reinterpret_cast<const void*>(&weight_gemm_kernel<WeightGemmTraits<Kernel, D, true>>)};
}

}  // namespace moegemm::cuda::sm90
