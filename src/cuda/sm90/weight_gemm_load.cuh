#pragma once

#include "cuda/device/swizzle.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/sm90/weight_gemm_shape.cuh"

/// The load role of the dW kernel: fills stages with rows of both operands, through tensor maps or,
/// for a gathered operand A, row by row with cp.async.
namespace moegemm::cuda::sm90 {

/// The row of the gathered operand that this lane's row of the stage is, or -1 for a row of zeros:
/// in front of the segment's part of the stage, or an index out of range.
template <typename Shape>
__device__ __forceinline__ int gathered_row(const WeightGemmParams& params, const WeightTile& tile,
                                            int block) {
  const RowRange range = block_rows(tile.rows, block, Shape::kRows);
  const int row = static_cast<int>(threadIdx.x % kWarpSize) - (Shape::kRows - range.count);
  if (row < 0) return -1;
  const int flat =
      flat_row(params.gather_indices, tile.row + range.first + row, params.total_rows);
  return flat < 0 ? -1
                  : static_cast<int>(
                        params.gather_divisor.divide(static_cast<std::uint32_t>(flat)));
}

/// Copies the stage's rows of operand A; lane r knows the source of row r. One instruction moves 128
/// bytes of 4 rows, so a row's address is worked out once for its 4 slabs.
template <typename Shape, bool AllValid>
__device__ __forceinline__ void gather_rows(const WeightGemmParams& params, std::uint32_t stage,
                                            int source_row, int a_col) {
  const int lane = threadIdx.x % kWarpSize;
  const int row_in_quad = lane / 8;
  const int chunk = lane % 8;
  const int column = a_col + chunk * 8;
  const unsigned char* columns = params.gathered + column * 2ll;
  const std::uint32_t even = stage + swizzle_128b(row_in_quad, chunk);
  const std::uint32_t odd = stage + swizzle_128b(row_in_quad + 4, chunk);
#pragma unroll
  for (int quad = 0; quad < Shape::kRows / 4; ++quad) {
    const int row = __shfl_sync(kFullMask, source_row, quad * 4 + row_in_quad);
    const std::uint32_t target = (quad % 2 == 0 ? even : odd) + quad / 2 * 1024;
    const unsigned char* source = columns + (AllValid || row >= 0 ? row : 0) *
                                                params.gathered_row_bytes;
#pragma unroll
    for (int slab = 0; slab < Shape::kASlabs; ++slab) {
      const std::uint32_t slab_target = target + slab * Shape::kSlabBytes;
      if constexpr (AllValid) {
        ptx::cp_async_16(slab_target, source + slab * 128);
      } else {
        const bool inside = row >= 0 && column + slab * kSlabCols < params.tiling.a_cols;
        ptx::cp_async_16_or_zero(slab_target, inside ? source + slab * 128 : params.gathered,
                                 inside);
      }
    }
  }
}

/// Boxes of one operand: Slabs slabs of 64 columns, with `valid` rows from `row` on at their end.
template <typename Shape, int Slabs>
__device__ __forceinline__ void load_boxes(const CUtensorMap& map, unsigned char* stage, int col,
                                           int valid, int row, std::uint64_t* full) {
#pragma unroll
  for (int slab = 0; slab < Slabs; ++slab) {
    ptx::cp_async_bulk_tensor_3d(stage + slab * Shape::kSlabBytes, &map, col + slab * kSlabCols,
                                 valid - Shape::kRows, row, full);
  }
}

template <typename Shape>
__device__ __forceinline__ void load_tiles(const WeightGemmParams& params, WeightSmem<Shape>& smem,
                                           int warp) {
  const int lane = threadIdx.x % kWarpSize;
  const bool gathers = params.gather_indices.data != nullptr;
  PipelineState<Shape::kStages / kLoadWarps> own;  // this warp's stages: warp, warp + 3, ...
  TileReader<Shape> reader(smem);
  int block = warp;  // this warp's next block, counted from the start of the tile
  while (true) {
    const WeightTile tile = reader.next();
    if (tile.expert < 0) break;
    const int blocks = row_blocks(tile.rows, Shape::kRows);
    const bool full_columns = tile.a_col + Shape::kACols <= params.tiling.a_cols;
    int source_row = gathers && block < blocks ? gathered_row<Shape>(params, tile, block) : -1;
    for (; block < blocks; block += kLoadWarps) {
      const int stage = warp + kLoadWarps * own.slot;
      std::uint64_t* full = &smem.loads.full[stage];
      ptx::mbarrier_wait(&smem.loads.empty[stage], own.phase ^ 1);
      own.advance();
      const RowRange range = block_rows(tile.rows, block, Shape::kRows);
      if (lane == 0) {
        ptx::mbarrier_arrive_expect_tx(full, Shape::kBBytes + (gathers ? 0 : Shape::kABytes));
        load_boxes<Shape, Shape::kBSlabs>(params.b_map, smem.b[stage], tile.b_col, range.count,
                                          tile.row + range.first, full);
        if (!gathers) {
          load_boxes<Shape, Shape::kASlabs>(params.a_map, smem.a[stage], tile.a_col, range.count,
                                            tile.row + range.first, full);
        }
      }
      __syncwarp();
      if (gathers) {
        const std::uint32_t target = ptx::shared_address(smem.a[stage]);
        if (full_columns && __all_sync(kFullMask, source_row >= 0)) {
          gather_rows<Shape, true>(params, target, source_row, tile.a_col);
        } else {
          gather_rows<Shape, false>(params, target, source_row, tile.a_col);
        }
        ptx::cp_async_mbarrier_arrive_noinc(full);
        // Fetched here, the next index has arrived by the time its stage is empty.
        if (block + kLoadWarps < blocks) {
          source_row = gathered_row<Shape>(params, tile, block + kLoadWarps);
        }
      }
    }
    block -= blocks;
  }
}

}  // namespace moegemm::cuda::sm90
