#pragma once

#include "cuda/device/swizzle.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/weight_gemm/params.h"

/// The load role of the dW kernel: fills stages with rows of both operands, through tensor maps or,
/// for a gathered operand A, row by row with cp.async.
///
/// What this role costs is the instructions that share a queue with wgmma, not their bytes and not
/// arithmetic: 8 shuffles a stage cost 3 % of the whole kernel. Lanes exchange row addresses
/// through shared memory instead (one store, two loads).
namespace moegemm::cuda::sm90 {

constexpr unsigned kNoRow = 0xffffffffu;

/// Where the row that an index names starts in the gathered operand, in chunks of 16 bytes, or
/// kNoRow for a row of zeros. 32 bits reach 64 GiB; larger operands are refused.
__device__ __forceinline__ unsigned gathered_chunk(const WeightGemmParams& params,
                                                   const IndexArray::Fetched& index) {
  const int flat = index.below(params.flat_rows);
  const unsigned row = params.gather_divisor.divide(static_cast<std::uint32_t>(flat));
  return flat < 0 ? kNoRow : row * params.gathered_row_chunks;
}

/// Copies the stage's rows of operand A; `row_chunks` says where each starts. One instruction moves
/// 128 bytes of 4 rows (lanes 8 g to 8 g + 7 take rows 8 g to 8 g + 7 in turn), so a row's address
/// is worked out once for its slabs. `columns` is the lane's chunk of the tile's first slab in row
/// 0 of the operand, `columns_left` the columns from there on.
template <typename Traits, bool AllValid>
__device__ __forceinline__ void gather_rows(const unsigned char* columns, int columns_left,
                                            std::uint32_t stage, const unsigned* row_chunks) {
  const int lane = threadIdx.x % kWarpSize;
  const int group = lane / 8;
  const std::uint32_t base = stage + swizzle_128b(group * 8, lane % 8);
  const auto* quads = reinterpret_cast<const uint4*>(row_chunks + group * 8);
  const uint4 low = quads[0];
  const uint4 high = quads[1];
  const unsigned starts[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int row = 0; row < 8; ++row) {
    // 128 bytes further per row, chunks swizzled by the row: both only flip bits of `base`.
    const std::uint32_t target = base ^ static_cast<std::uint32_t>(row * 128 | row << 4);
    const unsigned char* source = columns + starts[row] * 16ull;
#pragma unroll
    for (int slab = 0; slab < Traits::kASlabs; ++slab) {
      const std::uint32_t slab_target = target + slab * Traits::kSlabBytes;
      if constexpr (AllValid) {
        ptx::cp_async_16(slab_target, source + slab * 128);
      } else {
        ptx::cp_async_16_or_zero(slab_target, source + slab * 128,
                                 starts[row] != kNoRow && columns_left > slab * kSlabCols);
      }
    }
  }
}

/// Slabs slabs of 64 columns of one operand, in one box where that is possible.
template <typename Traits, int Slabs>
__device__ __forceinline__ void load_slabs(const CUtensorMap& map, bool one_box,
                                           unsigned char* stage, int col, const StageBox& box,
                                           std::uint64_t* full) {
  if (one_box) {
    ptx::cp_async_bulk_tensor_4d(stage, &map, 0, box.stage_row, col / kSlabCols, box.row, full);
    return;
  }
#pragma unroll
  for (int slab = 0; slab < Slabs; ++slab) {
    ptx::cp_async_bulk_tensor_3d(stage + slab * Traits::kSlabBytes, &map, col + slab * kSlabCols,
                                 box.stage_row, box.row, full);
  }
}

/// Fetches the indices of a stage, one per lane. Missing rows keep an index out of range.
__device__ __forceinline__ IndexArray::Fetched fetch_index(const WeightGemmParams& params,
                                                           const WeightTile& tile,
                                                           const StageRows& stage) {
  const int row = stage.first + static_cast<int>(threadIdx.x % kWarpSize);
  IndexArray::Fetched fetched;
  if (row >= stage.begin && row < stage.end) {
    fetched = params.gather_indices.fetch(tile.row + row);
  }
  return fetched;
}

/// The boxes of a stage, by one lane, which also announces their bytes.
template <typename Traits>
__device__ __forceinline__ void load_boxes(const WeightGemmParams& params,
                                           WeightGemmShared<Traits>& shared, int slot,
                                           const WeightTile& tile, const StageRows& rows, bool of_a,
                                           bool of_b) {
  std::uint64_t* full = &shared.loads.full[slot];
  ptx::mbarrier_arrive_expect_tx(full, (of_a ? Traits::kABytes : 0) + (of_b ? Traits::kBBytes : 0));
  const StageBox box = box_of_stage(tile, rows, Traits::kRows);
  if (of_b) {
    load_slabs<Traits, Traits::kBSlabs>(params.b_map, params.b_in_one_box, shared.b[slot],
                                        tile.b_col, box, full);
  }
  if (of_a) {
    load_slabs<Traits, Traits::kASlabs>(params.a_map, params.a_in_one_box, shared.a[slot],
                                        tile.a_col, box, full);
  }
}

/// A stage of a tile with absent rows, which no box leaves out: the opposite operand is copied row
/// by row, with zeros for absent ones; the other one, unless it is gathered, comes in a box. Rare:
/// short code, not fast.
template <typename Traits>
__device__ __forceinline__ void load_present_rows(const WeightGemmParams& params,
                                                  WeightGemmShared<Traits>& shared, int slot,
                                                  const WeightTile& tile, const StageRows& rows) {
  constexpr int kChunks = kSlabCols / 8;  // of a row in a slab
  const int lane = threadIdx.x % kWarpSize;
  const bool is_a = params.opposite_is_a;
  const std::uint32_t stage = ptx::shared_address(is_a ? shared.a[slot] : shared.b[slot]);
  const int first_column = is_a ? tile.a_col : tile.b_col;
  const int columns = is_a ? params.a_cols : params.b_cols;
  const int chunks = (is_a ? Traits::kABytes : Traits::kBBytes) / 16;
  const unsigned present =
      __ballot_sync(kFullMask, fetch_index(params, tile, rows).below(params.flat_rows) >= 0);
#pragma unroll 1
  for (int i = lane; i < chunks; i += kWarpSize) {
    const int chunk = i % kChunks;
    const int place = i / kChunks % Traits::kRows;
    const int slab = i / (kChunks * Traits::kRows);
    const int column = first_column + slab * kSlabCols + chunk * 8;
    const unsigned char* source = params.opposite +
                                  (tile.row + rows.first + place) * params.opposite_row_bytes +
                                  column * 2ll;
    ptx::cp_async_16_or_zero(stage + slab * Traits::kSlabBytes + swizzle_128b(place, chunk), source,
                             (present >> place & 1) && column < columns);
  }
  const bool gathers = params.gathered != nullptr;
  if (!gathers) {  // with a gathered operand every lane arrives for its copies, else lane 0 for all
    ptx::cp_async_wait_all();
    ptx::fence_proxy_async_shared();
  }
  __syncwarp();
  if (lane == 0) load_boxes(params, shared, slot, tile, rows, !gathers && !is_a, is_a);
}

template <typename Traits>
__device__ __forceinline__ void load_tiles(const WeightGemmParams& params,
                                           WeightGemmShared<Traits>& shared, int warp) {
  const int lane = threadIdx.x % kWarpSize;
  const bool gathers = params.gathered != nullptr;
  unsigned* row_chunks = shared.row_chunks[warp];
  PipelineState<Traits::kStages / kLoadWarps> own;  // this warp's stages: warp, warp + 3, ...
  TileReader<Traits> reader(shared);
  int index = warp;  // this warp's next stage, counted from the start of the tile
  while (true) {
    const WeightGemmTile tile = reader.next();
    if (tile.expert < 0) break;
    const int stages = stages_of(tile.rows, Traits::kRows);
    const bool full_columns = tile.a_col + Traits::kACols <= params.a_cols;
    const int column = tile.a_col + lane % 8 * 8;
    const unsigned char* columns = ptx::opaque(params.gathered + column * 2ll);
    const int columns_left = params.a_cols - column;
    StageRows rows = rows_of_stage(tile, index, Traits::kRows);
    IndexArray::Fetched row_index;
    if (gathers) row_index = fetch_index(params, tile, rows);
    for (; index < stages; index += kLoadWarps) {
      const int slot = warp + kLoadWarps * own.slot;
      std::uint64_t* full = &shared.loads.full[slot];
      ptx::mbarrier_wait(&shared.loads.empty[slot], own.phase ^ 1);
      own.advance();
      if (tile.has_absent_rows) {
        load_present_rows(params, shared, slot, tile, rows);
      } else if (lane == 0) {
        load_boxes(params, shared, slot, tile, rows, !gathers, true);
      }
      __syncwarp();
      rows = rows_of_stage(tile, index + kLoadWarps, Traits::kRows);
      if (gathers) {
        const unsigned row_chunk = gathered_chunk(params, row_index);
        // Fetched ahead, the next indices have arrived by the time their stage is empty.
        row_index = fetch_index(params, tile, rows);
        row_chunks[lane] = row_chunk;
        const bool all_valid = __all_sync(kFullMask, row_chunk != kNoRow) && full_columns;
        __syncwarp();
        const std::uint32_t target = ptx::shared_address(shared.a[slot]);
        if (all_valid) {
          gather_rows<Traits, true>(columns, columns_left, target, row_chunks);
        } else {
          gather_rows<Traits, false>(columns, columns_left, target, row_chunks);
        }
        ptx::cp_async_mbarrier_arrive_noinc(full);
      }
    }
    index -= stages;
  }
}

}  // namespace moegemm::cuda::sm90
