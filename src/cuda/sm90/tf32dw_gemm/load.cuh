#pragma once

#include "cuda/device/swizzle.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma_tf32.cuh"
#include "cuda/sm90/tf32dw_gemm/params.h"

/// The producers of the TF32 dW: tiles, boxes of A, and B through registers.
namespace moegemm::cuda::sm90 {

/// A warp's 32 columns of B for 32 rows of the contraction. A lane has four columns of two quads of
/// rows: it loads 16 bytes of each row and stores 16 bytes of each column. Lanes are laid out so
/// that four rows of 128 bytes are loaded at once, and eight lanes store to all banks.
template <typename Traits>
class TurnedColumns {
 public:
  __device__ __forceinline__ TurnedColumns(const Tf32dwParams& params, const WeightTile& tile,
                                           int warp)
      : params_(params), tile_(tile) {
    const int lane = threadIdx.x % kWarpSize;
    const int chunk = lane % 2 + lane / 8 * 2;
    first_row_ = lane / 2 % 4 * 4;
    const int column = warp * Traits::kSlabCols + chunk * 4;
    inside_ = tile.b_col + column < params.b_cols;
    source_ = params.b + (tile.b_col + column) * 4ll;
    target_ = swizzle_128b(column, first_row_ / 4);
  }

  /// The index of the lane's row of a stage, where there are indices.
  __device__ __forceinline__ void fetch_index(int stage) {
    const int row = stage * Traits::kRows + static_cast<int>(threadIdx.x % kWarpSize);
    in_segment_ = row < tile_.rows;
    place_ = tile_.row + row;
    if (params_.gather_indices.data && in_segment_) {
      index_ = params_.gather_indices.fetch(place_);
    }
  }

  /// Requests the rows of the stage whose indices were fetched. Returns which count.
  __device__ __forceinline__ unsigned request() {
    int row = in_segment_ ? place_ : -1;
    if (params_.gather_indices.data && in_segment_) {
      const int flat = index_.below(params_.flat_rows);
      if (flat < 0) {
        row = -1;
      } else if (params_.gathered) {
        row = static_cast<int>(params_.gather_divisor.divide(static_cast<std::uint32_t>(flat)));
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int from = __shfl_sync(kFullMask, row, first_row_ + i % 4 + i / 4 * 16);
      const auto* at = reinterpret_cast<const uint4*>(source_ + from * params_.b_row_bytes);
      rows_[i] = from >= 0 && inside_ ? __ldg(at) : uint4{};
    }
    return __ballot_sync(kFullMask, row >= 0);
  }

  /// Stores what was requested, rounded, columns becoming rows of 128 bytes.
  __device__ __forceinline__ void store(std::uint32_t panel) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4* rows = rows_ + half * 4;
      // 64 bytes on is the upper bit of the chunk; a column further is a row of shared memory, with
      // another swizzle.
      store_column(panel, half, 0, rows[0].x, rows[1].x, rows[2].x, rows[3].x);
      store_column(panel, half, 1, rows[0].y, rows[1].y, rows[2].y, rows[3].y);
      store_column(panel, half, 2, rows[0].z, rows[1].z, rows[2].z, rows[3].z);
      store_column(panel, half, 3, rows[0].w, rows[1].w, rows[2].w, rows[3].w);
    }
  }

 private:
  __device__ __forceinline__ void store_column(std::uint32_t panel, int half, int column,
                                               std::uint32_t r0, std::uint32_t r1, std::uint32_t r2,
                                               std::uint32_t r3) const {
    const int at = (target_ ^ (half * 64) ^ (column << 4)) + column * 128;
    ptx::st_shared_16(panel + at, {ptx::round_to_tf32(r0), ptx::round_to_tf32(r1),
                                   ptx::round_to_tf32(r2), ptx::round_to_tf32(r3)});
  }

  const Tf32dwParams& params_;
  const WeightTile& tile_;
  const std::byte* source_;
  int target_;
  int first_row_;
  int place_ = 0;
  bool inside_;
  bool in_segment_ = false;
  IndexArray::Fetched index_;
  uint4 rows_[8];
};

/// The boxes of A of a stage, by one thread.
template <typename Traits>
__device__ __forceinline__ void load_a(const Tf32dwParams& params, std::byte* panel,
                                       const WeightTile& tile, int row, std::uint64_t* full) {
  ptx::mbarrier_arrive_expect_tx(full, Traits::kABytes);
  if (params.a_in_one_box) {
    ptx::cp_async_bulk_tensor_3d(panel, &params.a_map, 0, row, tile.a_col / Traits::kSlabCols,
                                 full);
    return;
  }
#pragma unroll 1
  for (int slab = 0; slab < Traits::kASlabs; ++slab) {
    ptx::cp_async_bulk_tensor_2d(panel + slab * Traits::kSlabBytes, &params.a_map,
                                 tile.a_col + slab * Traits::kSlabCols, row, full);
  }
}

template <typename Traits>
__device__ __forceinline__ void load_tile(const Tf32dwParams& params, Tf32dwShared<Traits>& shared,
                                          const WeightTile& tile, int warp,
                                          PipelineState<Traits::kStages>& state) {
  const int stages = ceil_div(tile.rows, Traits::kRows);
  if (stages == 0) return;
  TurnedColumns<Traits> columns(params, tile, warp);
  columns.fetch_index(0);
  unsigned mask = columns.request();
  columns.fetch_index(1);
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage, state.advance()) {
    shared.loads.wait_empty(state);
    std::uint64_t* full = &shared.loads.full[state.slot];
    if (threadIdx.x == 0) {
      load_a<Traits>(params, shared.a[state.slot], tile, tile.row + stage * Traits::kRows, full);
      shared.masks[state.slot] = mask;
    }
    columns.store(ptx::shared_address(shared.b[state.slot]));
    ptx::fence_proxy_async_shared();  // wgmma reads through the async proxy
    ptx::mbarrier_arrive(full);
    mask = columns.request();
    columns.fetch_index(stage + 2);
  }
}

/// All four producer warps. The first one hands out the tiles.
template <typename Traits>
__device__ __forceinline__ void produce(const Tf32dwParams& params, Tf32dwShared<Traits>& shared,
                                        int warp) {
  PipelineState<Traits::kStages> state;
  if (warp > 0) {
    TileReader<Traits> tiles(shared);
    while (true) {
      const WeightTile tile = tiles.next();
      if (tile.is_end()) return;
      load_tile(params, shared, tile, warp, state);
    }
  }
  TileScheduler<Traits, Tf32dwParams> tiles(params, shared);
  for (; !tiles.done(); tiles.advance()) {
    const WeightTile tile = tiles.current();
    if (tiles.stays(tile)) continue;
    tiles.publish(tile);
    __syncwarp();
    load_tile(params, shared, tile, warp, state);
  }
  tiles.end();
}

}  // namespace moegemm::cuda::sm90
