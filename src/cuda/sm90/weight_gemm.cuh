#pragma once

#include "cuda/device/pipeline.cuh"
#include "cuda/device/tile_scheduler.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/weight_gemm_load.cuh"
#include "cuda/sm90/weight_gemm_shape.cuh"
#include "cuda/sm90/weight_gemm_store.cuh"

/// dW_e = dY_e^T X_e for all experts in one persistent launch.
///
/// Both operands are read as they lie in memory: rows of the contraction, columns contiguous, which
/// is wgmma's MN-major form. A CTA of 384 threads:
///
/// | warps | role      | registers | waits for                        | signals                      |
/// |-------|-----------|-----------|----------------------------------|------------------------------|
/// | 0-2   | load      | 56        | tiles.full, loads.empty          | loads.full, tiles.empty      |
/// | 3     | schedule  | 56        | tiles.empty                      | tiles.full                   |
/// | 4-7   | multiply, | 224       | tiles.full, loads.full, its      | loads.empty, tiles.empty     |
/// | 8-11  | store     |           | staging buffer                   |                              |
///
/// Each multiplying warpgroup has two blocks of 64 A columns by all B columns of the tile. The store
/// of a tile runs under multiplications: block 0 is stored while the last rows of block 1 multiply,
/// and block 1, rounded and kept in registers, while the first rows of the next tile do.
namespace moegemm::cuda::sm90 {

template <typename Shape>
__device__ __forceinline__ void schedule_tiles(const WeightGemmParams& params,
                                               WeightSmem<Shape>& smem) {
  scan_segments(params.m_sizes, params.experts, params.total_rows, 1, smem.row_prefix, nullptr);
  __syncwarp();
  const int lane = threadIdx.x % kWarpSize;
  const int total = params.experts * params.tiling.tiles_per_expert();
  TileQueue queue(params.counter, total);
  PipelineState<kTileSlots> slot;
  const auto publish = [&](const WeightTile& tile) {
    smem.tile_ring.wait_empty(slot);
    if (lane == 0) {
      smem.tiles[slot.slot] = tile;
      ptx::mbarrier_arrive(&smem.tile_ring.full[slot.slot]);
    }
    slot.advance();
  };
  for (; !queue.done(); queue.advance()) {
    WeightTile tile =
        decode_weight_tile(queue.current(), params.tiling, Shape::kACols, Shape::kBCols);
    tile.row = smem.row_prefix[tile.expert];
    tile.rows = smem.row_prefix[tile.expert + 1] - tile.row;
    // dW += nothing: left alone, so that not even -0.0 changes.
    if (tile.rows == 0 && params.output == WeightOutput::kAddToFloat32) continue;
    publish(tile);
  }
  publish({.expert = -1});
  if (lane == 0) queue.leave();
}

/// acc (+)= A[64 columns] B over one stage.
template <typename Shape, bool Start>
__device__ __forceinline__ void multiply_block(float* acc, std::uint64_t a, std::uint64_t b) {
  using ptx::Major;
  constexpr std::uint32_t kStep = ptx::kDescriptorStepK16<Major::kMn>;
  using T = typename Shape::Element;
#pragma unroll
  for (int k = 0; k < Shape::kRows / 16; ++k) {
    if (Start && k == 0) {
      ptx::wgmma_start<T, Shape::kBCols, Major::kMn, Major::kMn>(acc, a, b);
    } else {
      ptx::wgmma<T, Shape::kBCols, Major::kMn, Major::kMn>(acc, a + k * kStep, b + k * kStep, true);
    }
  }
  ptx::wgmma_commit_group();
}

template <int Count>
__device__ __forceinline__ void hold_accumulators(float (&acc)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) ptx::accumulator_barrier(acc[i]);
}

template <typename Shape>
__device__ __forceinline__ void multiply_and_store(const WeightGemmParams& params,
                                                   WeightSmem<Shape>& smem) {
  const int group = ptx::uniform(threadIdx.x / kWarpgroupSize - 1);
  const int lane = threadIdx.x % kWarpSize;
  constexpr std::uint32_t kSlab = Shape::kSlabBytes >> 4;
  const std::uint64_t a_base =
      ptx::smem_descriptor(ptx::shared_address(smem.a[0]), Shape::kSlabBytes) + 2 * group * kSlab;
  const std::uint64_t b_base =
      ptx::smem_descriptor(ptx::shared_address(smem.b[0]), Shape::kSlabBytes);
  const WeightStore<Shape> store(params, smem.staging[group], group);

  PipelineState<Shape::kStages> stage;
  TileReader<Shape> reader(smem);
  std::uint32_t packed[Shape::kBCols / 4];
  WeightTile last;
  last.expert = -1;
  const auto release = [&](int slot) {
    if (lane == 0) ptx::mbarrier_arrive(&smem.loads.empty[slot]);
  };
  while (true) {
    const WeightTile tile = reader.next();
    if (tile.expert < 0) break;
    const int blocks = row_blocks(tile.rows, Shape::kRows);
    float acc0[Shape::kBCols / 2];
    float acc1[Shape::kBCols / 2];

    smem.loads.wait_full(stage);
    // Gathered rows were written by the generic proxy; wgmma reads through the async proxy.
    ptx::fence_proxy_async_shared();
    std::uint64_t a = a_base + stage.slot * (Shape::kABytes >> 4);
    std::uint64_t b = b_base + stage.slot * (Shape::kBBytes >> 4);
    ptx::wgmma_fence();
    multiply_block<Shape, true>(acc0, a, b);
    if (!Shape::kFloatOutput && last.expert >= 0) store.store_packed(packed, last, 1);
    ptx::wgmma_fence();
    multiply_block<Shape, true>(acc1, a + kSlab, b);
#pragma unroll 1
    for (int block = 1; block < blocks; ++block) {
      const int previous = stage.slot;
      stage.advance();
      smem.loads.wait_full(stage);
      ptx::fence_proxy_async_shared();
      a = a_base + stage.slot * (Shape::kABytes >> 4);
      b = b_base + stage.slot * (Shape::kBBytes >> 4);
      ptx::wgmma_fence();
      multiply_block<Shape, false>(acc0, a, b);
      multiply_block<Shape, false>(acc1, a + kSlab, b);
      ptx::wgmma_wait_group<2>();
      release(previous);
    }
    if constexpr (Shape::kFloatOutput) {
      ptx::wgmma_wait_group<0>();
      release(stage.slot);
      hold_accumulators(acc0);
      hold_accumulators(acc1);
      store.store_float(acc0, tile, 0);
      store.store_float(acc1, tile, 1);
    } else {
      ptx::wgmma_wait_group<1>();
      hold_accumulators(acc0);
      store.pack(acc0, packed);
      store.store_packed(packed, tile, 0);
      ptx::wgmma_wait_group<0>();
      release(stage.slot);
      hold_accumulators(acc1);
      store.pack(acc1, packed);
    }
    stage.advance();
    last = tile;
  }
  if (!Shape::kFloatOutput && last.expert >= 0) store.store_packed(packed, last, 1);
  store.finish();
}

template <typename Shape>
__global__ void __launch_bounds__(kWeightGemmThreads, 1)
    weight_gemm(const __grid_constant__ WeightGemmParams params) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<WeightSmem<Shape>*>(shared);
  const int warp = ptx::uniform(threadIdx.x / kWarpSize);

  if (threadIdx.x == 0) {
    const bool gathers = params.gather_indices.data != nullptr;
    smem.loads.init(gathers ? 1 + kWarpSize : 1, kMultiplyWarps);
    smem.tile_ring.init(1, kMultiplyWarps + kLoadWarps);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&params.a_map);
    ptx::prefetch_tensormap(&params.b_map);
    ptx::prefetch_tensormap(&params.out_map);
  }
  __syncthreads();

  if (warp < kLoadWarps + 1) {
    ptx::setmaxnreg_dec<kLoadRegisters>();
    if (warp < kLoadWarps) {
      load_tiles(params, smem, warp);
    } else {
      schedule_tiles(params, smem);
    }
  } else {
    ptx::setmaxnreg_inc<kMultiplyRegisters>();
    multiply_and_store(params, smem);
  }
}

}  // namespace moegemm::cuda::sm90
