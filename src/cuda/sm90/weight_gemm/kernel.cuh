#pragma once

#include <type_traits>

#include "cuda/device/expert_order.cuh"
#include "cuda/device/pipeline.cuh"
#include "cuda/device/tile_scheduler.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/weight_gemm/load.cuh"
#include "cuda/sm90/weight_gemm/shape.cuh"
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

template <typename Shape>
__device__ __forceinline__ void schedule_tiles(const WeightGemmParams& params,
                                               WeightSmem<Shape>& smem) {
  scan_segments(params.m_sizes, params.experts, params.total_rows, 1, smem.row_prefix, nullptr);
  __syncwarp();
  unsigned short* order = smem.order(params.experts);
  // A tile that starts last can make the launch this much longer: 1/32 of a block's share at most.
  const float share = static_cast<float>(params.total_rows / Shape::kRows) *
                      static_cast<float>(params.tiling.tiles_per_expert()) /
                      static_cast<float>(gridDim.x);
  order_large_first(smem.row_prefix, params.experts, Shape::kRows, static_cast<int>(share / 32),
                    smem.class_counts, order);
  __syncwarp();
  const int lane = threadIdx.x % kWarpSize;
  const int total = params.experts * params.tiling.tiles_per_expert();
  TileQueue queue(params.counter, total);
  PipelineState<kTileSlots> slot;
  int looked_at = -1;  // the expert whose indices were last looked at, and what was found
  bool absent = false;
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
    tile.expert = order[tile.expert];
    tile.row = smem.row_prefix[tile.expert];
    tile.rows = smem.row_prefix[tile.expert + 1] - tile.row;
    if (params.gather_indices.data && tile.expert != looked_at) {
      looked_at = tile.expert;
      absent = has_absent_rows(params, tile);
    }
    tile.has_absent_rows = absent;
    // dW += nothing: left alone, so that not even -0.0 changes.
    if (tile.rows == 0 && params.output == WeightOutput::kAddToFloat32) continue;
    publish(tile);
  }
  publish({.expert = -1});
  if (lane == 0) queue.leave();
}

/// A filled stage as wgmma takes it: descriptors of the warpgroup's first 64 A columns and of B.
struct StageOperands {
  std::uint64_t a;
  std::uint64_t b;
  int slot;
};

/// A warpgroup's view of the stages that the load warps fill.
template <typename Shape>
class StageReader {
 public:
  static constexpr std::uint32_t kSlabStep = Shape::kSlabBytes >> 4;  ///< to the next 64 A columns

  __device__ __forceinline__ StageReader(WeightSmem<Shape>& smem, int group)
      : loads_(smem.loads),
        a_(ptx::smem_descriptor(ptx::shared_address(smem.a[0]), Shape::kSlabBytes) +
           2 * group * kSlabStep),
        b_(ptx::smem_descriptor(ptx::shared_address(smem.b[0]), Shape::kSlabBytes)) {}

  __device__ __forceinline__ StageOperands next() {
    loads_.wait_full(state_);
    // Gathered rows were written by the generic proxy; wgmma reads through the async proxy.
    ptx::fence_proxy_async_shared();
    const int slot = state_.slot;
    state_.advance();
    return {a_ + slot * (Shape::kABytes >> 4), b_ + slot * (Shape::kBBytes >> 4), slot};
  }

  __device__ __forceinline__ void release(int slot) {
    if (threadIdx.x % kWarpSize == 0) ptx::mbarrier_arrive(&loads_.empty[slot]);
  }

 private:
  Ring<Shape::kStages>& loads_;
  std::uint64_t a_;
  std::uint64_t b_;
  PipelineState<Shape::kStages> state_;
};

/// acc (+)= A[64 columns] B[Cols columns] over one stage, as one wgmma group.
template <typename Shape, int Cols, bool Start>
__device__ __forceinline__ void multiply_stage(float* acc, std::uint64_t a, std::uint64_t b) {
  using ptx::Major;
  using T = typename Shape::Element;
  constexpr std::uint32_t kStep = ptx::kDescriptorStepK16<Major::kMn>;
#pragma unroll
  for (int k = 0; k < Shape::kRows / 16; ++k) {
    if (Start && k == 0) {
      ptx::wgmma_start<T, Cols, Major::kMn, Major::kMn>(acc, a, b);
    } else {
      ptx::wgmma<T, Cols, Major::kMn, Major::kMn>(acc, a + k * kStep, b + k * kStep, true);
    }
  }
  ptx::wgmma_commit_group();
}

/// Issues a whole tile of Cols B columns, block 0 into acc0 and block 1 into acc1, and calls
/// `under_lead` while the first stages of block 0 multiply. Returns with the last stage's two
/// groups in flight: its slot is the caller's to release.
template <int Cols, typename Shape, typename UnderLead>
__device__ __forceinline__ int multiply_tile(StageReader<Shape>& loads, int stages,
                                             float (&acc0)[Cols / 2], float (&acc1)[Cols / 2],
                                             const UnderLead& under_lead) {
  constexpr std::uint32_t kSlabStep = StageReader<Shape>::kSlabStep;
  static_assert(kLeadStages == 2);
  const StageOperands first = loads.next();
  ptx::wgmma_fence();
  multiply_stage<Shape, Cols, true>(acc0, first.a, first.b);
  const StageOperands second = loads.next();
  ptx::wgmma_fence();
  multiply_stage<Shape, Cols, false>(acc0, second.a, second.b);
  under_lead();
  ptx::wgmma_fence();
  multiply_stage<Shape, Cols, true>(acc1, first.a + kSlabStep, first.b);
  multiply_stage<Shape, Cols, false>(acc1, second.a + kSlabStep, second.b);
  ptx::wgmma_wait_group<1>();
  loads.release(first.slot);
  int previous = second.slot;
#pragma unroll 1
  for (int stage = kLeadStages; stage < stages; ++stage) {
    const StageOperands current = loads.next();
    ptx::wgmma_fence();
    multiply_stage<Shape, Cols, false>(acc0, current.a, current.b);
    multiply_stage<Shape, Cols, false>(acc1, current.a + kSlabStep, current.b);
    ptx::wgmma_wait_group<2>();
    loads.release(previous);
    previous = current.slot;
  }
  return previous;
}

template <int Pending, int Count>
__device__ __forceinline__ void wait_for_accumulators(float (&acc)[Count]) {
  ptx::wgmma_wait_group<Pending>();
#pragma unroll
  for (int i = 0; i < Count; ++i) ptx::accumulator_barrier(acc[i]);
}

/// Lets the stages of a tile go by.
template <typename Shape>
__device__ __forceinline__ void skip_tile(StageReader<Shape>& loads, int stages) {
  for (int stage = 0; stage < stages; ++stage) loads.release(loads.next().slot);
}

/// Calls `body` with the width of the tile's B columns as a constant: all, or all but one slab if
/// no more are left. A third width spills registers.
template <typename Shape, typename Body>
__device__ __forceinline__ void with_tile_cols(int cols_left, const Body& body) {
  if (cols_left > Shape::kBCols - kSlabCols) {
    body(std::integral_constant<int, Shape::kBCols>{});
  } else {
    body(std::integral_constant<int, Shape::kBCols - kSlabCols>{});
  }
}

/// 16-bit output: the stores of both blocks run under multiplications.
template <typename Shape>
__device__ __forceinline__ void multiply_and_store(const WeightGemmParams& params,
                                                   WeightSmem<Shape>& smem) {
  const int group = ptx::uniform(threadIdx.x / kWarpgroupSize - 1);
  WeightStore<Shape> store(params, smem, group);
  StageReader<Shape> loads(smem, group);
  TileReader<Shape> tiles(smem);
  std::uint32_t packed[Shape::kBCols / 4] = {};  // block 1 of `last`, rounded, not yet stored
  WeightTile last = {.expert = -1};
  const auto store_last = [&] {
    if (last.expert >= 0) store.store_packed(packed, last, 1);
  };
  for (WeightTile tile = tiles.next(); tile.expert >= 0; tile = tiles.next()) {
    const int stages = stages_of(tile.rows, Shape::kRows);
    if (tile.a_col + group * 2 * kSlabCols >= params.tiling.a_cols) {
      store_last();
      last.expert = -1;
      skip_tile(loads, stages);
      continue;
    }
    with_tile_cols<Shape>(params.tiling.b_cols - tile.b_col, [&](auto cols) {
      float acc0[cols / 2];
      float acc1[cols / 2];
      const int slot = multiply_tile<cols>(loads, stages, acc0, acc1, store_last);
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
template <typename Shape>
__device__ __forceinline__ void multiply_and_store_float(const WeightGemmParams& params,
                                                         WeightSmem<Shape>& smem) {
  const int group = ptx::uniform(threadIdx.x / kWarpgroupSize - 1);
  WeightStore<Shape> store(params, smem, group);
  StageReader<Shape> loads(smem, group);
  TileReader<Shape> tiles(smem);
  for (WeightTile tile = tiles.next(); tile.expert >= 0; tile = tiles.next()) {
    const int stages = stages_of(tile.rows, Shape::kRows);
    if (tile.a_col + group * 2 * kSlabCols >= params.tiling.a_cols) {
      skip_tile(loads, stages);
      continue;
    }
    float acc0[Shape::kBCols / 2];
    float acc1[Shape::kBCols / 2];
    const int slot =
        multiply_tile<Shape::kBCols>(loads, stages, acc0, acc1, [&] { store.prefetch_old(tile); });
    wait_for_accumulators<0>(acc0);
    wait_for_accumulators<0>(acc1);
    loads.release(slot);
    store.store_float(acc0, tile, 0);
    store.store_float(acc1, tile, 1);
  }
  store.finish();
}

template <typename Shape>
__global__ void __launch_bounds__(kWeightGemmThreads, 1)
    weight_gemm(const __grid_constant__ WeightGemmParams params) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& smem = *reinterpret_cast<WeightSmem<Shape>*>(shared);
  const int warp = ptx::uniform(threadIdx.x / kWarpSize);

  if (threadIdx.x == 0) {
    smem.loads.init(params.gathered ? 1 + kWarpSize : 1, kMultiplyWarps);
    smem.tile_ring.init(1, (kMultiplyWarps + kLoadWarps) * kWarpSize);
    for (auto& barrier : smem.old_full) ptx::mbarrier_init(&barrier, 1);
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
    if constexpr (Shape::kFloatOutput) {
      multiply_and_store_float(params, smem);
    } else {
      multiply_and_store(params, smem);
    }
  }
}

}  // namespace moegemm::cuda::sm90
