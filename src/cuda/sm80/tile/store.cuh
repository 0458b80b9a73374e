#pragma once

#include "cuda/device/element.cuh"
#include "cuda/sm80/tile/mma.cuh"
#include "cuda/sm80/tile/params.h"

/// From accumulators to device memory, without shared memory: mma.sync leaves pairs of columns in a
/// lane, four lanes trade them so that each has 16 bytes of a row. Where the stages' columns are
/// placed for it (placed_column), it has them already.
namespace moegemm::cuda::sm80 {

/// Four lanes t hold words w[0..3]; afterwards lane t holds word t of each of them, in lane order.
__device__ __forceinline__ uint4 transpose_quad(const std::uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1;
  const bool high = threadIdx.x & 2;
  // 2x2 blocks between neighbours: ab[i] is words 2 i (even lanes) or 2 i + 1 (odd lanes).
  std::uint32_t own[2], other[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    own[i] = odd ? w[2 * i + 1] : w[2 * i];
    other[i] = __shfl_xor_sync(kFullMask, odd ? w[2 * i] : w[2 * i + 1], 1);
  }
  const std::uint32_t low0 = odd ? other[0] : own[0], low1 = odd ? own[0] : other[0];
  const std::uint32_t high0 = odd ? other[1] : own[1], high1 = odd ? own[1] : other[1];
  const std::uint32_t got0 = __shfl_xor_sync(kFullMask, high ? low0 : high0, 2);
  const std::uint32_t got1 = __shfl_xor_sync(kFullMask, high ? low1 : high1, 2);
  return high ? uint4{got0, got1, high0, high1} : uint4{low0, low1, got0, got1};
}

/// A kernel that loads vectors stores vectors: rows of the output are then aligned and hold whole
/// ones.
template <typename Traits>
constexpr bool kVectors = Traits::kLoads == Loads::kVectors;

/// dW alone adds to what is there.
template <typename Traits>
constexpr bool kAccumulates = Traits::kAMajor == Major::kOuter;

/// 16-bit results of one row of this thread: half h of row block `acc`.
template <typename Traits>
__device__ __forceinline__ void store_row_16(const float (&acc)[Traits::Shape::kColBlocks][4],
                                             int half, const OutputView& out, int row, int col) {
  using Element = typename Traits::Element;
  auto* line = static_cast<Element*>(out.data) + row * out.stride;
  const int t = lane_id() % 4;
#pragma unroll
  for (int j = 0; j < Traits::Shape::kColBlocks; j += 4) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = round_pair(acc[j + i][2 * half], acc[j + i][2 * half + 1], Element{});
    }
    const uint4 chunk = Traits::kPlacedColumns ? uint4{pairs[0], pairs[1], pairs[2], pairs[3]}
                                               : transpose_quad(pairs);
    const int first = col + (j + t) * 8;
    if (row < 0) continue;
    if constexpr (kVectors<Traits>) {
      if (first < out.cols) *reinterpret_cast<uint4*>(line + first) = chunk;
    } else {
      const auto* elements = reinterpret_cast<const Element*>(&chunk);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (first + i < out.cols) line[first + i] = elements[i];
      }
    }
  }
}

/// A lane has four neighbouring columns in column blocks j and j + 1, j even.
template <typename Traits>
constexpr bool kFourColumns = Traits::kPlacedColumns || Traits::kMath == Math::kFloat;

/// fp32 results of one row as vectors of four columns.
template <typename Traits>
__device__ __forceinline__ void store_fours(const float (&acc)[Traits::Shape::kColBlocks][4],
                                            int half, const OutputView& out, float* line, int col,
                                            bool adds) {
#pragma unroll
  for (int j = 0; j < Traits::Shape::kColBlocks; j += 2) {
    const int first = col + lane_col<Traits>(j);
    if (first >= out.cols) continue;
    auto* target = reinterpret_cast<float4*>(line + first);
    float4 four = {acc[j][2 * half], acc[j][2 * half + 1], acc[j + 1][2 * half],
                   acc[j + 1][2 * half + 1]};
    if (adds) {
      const float4 old = *target;
      four = {old.x + four.x, old.y + four.y, old.z + four.z, old.w + four.w};
    }
    *target = four;
  }
}

/// As pairs of columns, which are as wide as a sector's share of a lane, or one by one.
template <typename Traits>
__device__ __forceinline__ void store_pairs(const float (&acc)[Traits::Shape::kColBlocks][4],
                                            int half, const OutputView& out, float* line, int col,
                                            bool adds) {
#pragma unroll
  for (int j = 0; j < Traits::Shape::kColBlocks; ++j) {
    const int first = col + lane_col<Traits>(j);
    float2 pair = {acc[j][2 * half], acc[j][2 * half + 1]};
    if constexpr (kVectors<Traits>) {
      if (first >= out.cols) continue;
      auto* target = reinterpret_cast<float2*>(line + first);
      if (adds) {
        const float2 old = *target;
        pair = {old.x + pair.x, old.y + pair.y};
      }
      *target = pair;
    } else {
      if (first < out.cols) line[first] = adds ? line[first] + pair.x : pair.x;
      if (first + 1 < out.cols) {
        line[first + 1] = adds ? line[first + 1] + pair.y : pair.y;
      }
    }
  }
}

/// fp32 results of one row of this thread.
template <typename Traits>
__device__ __forceinline__ void store_row_fp32(const float (&acc)[Traits::Shape::kColBlocks][4],
                                               int half, const OutputView& out, int row, int col) {
  if (row < 0) return;
  float* line = static_cast<float*>(out.data) + row * out.stride;
  const bool adds = kAccumulates<Traits> && out.accumulate;
  if constexpr (kFourColumns<Traits> && kVectors<Traits>) {
    store_fours<Traits>(acc, half, out, line, col, adds);
  } else {
    store_pairs<Traits>(acc, half, out, line, col, adds);
  }
}

/// A whole tile. rows[2 i + h] is the output row of half h of this thread's row block i, negative
/// for none. Row blocks from `row_blocks` on hold nothing.
template <typename Traits>
__device__ __forceinline__ void store_tile(const Accumulators<Traits>& acc, int row_blocks,
                                           const OutputView& out,
                                           const int (&rows)[2 * Traits::Shape::kRowBlocks],
                                           int tile_col) {
  using Shape = typename Traits::Shape;
  const int col = tile_col + warp_col<Shape>();
  const auto store = [&](bool fp32) {
#pragma unroll
    for (int i = 0; i < Shape::kRowBlocks; ++i) {
      if (i >= row_blocks) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (Traits::kElementBytes == 2) {
          if (!fp32) {
            store_row_16<Traits>(acc[i], half, out, rows[2 * i + half], col);
            continue;
          }
        }
        store_row_fp32<Traits>(acc[i], half, out, rows[2 * i + half], col);
      }
    }
  };
  if (!Traits::kPlacedColumns) {
    store(out.is_fp32);
  } else if (out.is_fp32) {  // asked once: without trading, rows are stored in few instructions
    store(true);
  } else {
    store(false);
  }
}

}  // namespace moegemm::cuda::sm80
