#pragma once

#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/shared_floats.cuh"
#include "cuda/sm80/tile/lanes.cuh"
#include "cuda/sm80/tile/stage.h"
#include "cuda/sm80/tile/traits.h"

/// The main loop in exact fp32: multiply-adds, depth by depth, one chain for each result. A thread
/// has 16 x 8 results or 8 x 16: six loads of 16 bytes for every 128 multiply-adds.
namespace moegemm::cuda::sm80 {

/// Four depths of a thread's columns of B.
template <typename Traits>
struct FloatColumns {
  static constexpr int kCount = 2 * Traits::Shape::kColBlocks;
  float values[4][kCount];  ///< [depth][column]
};

/// A thread's view of the operands in a stage.
template <typename Traits>
class FloatReader {
  using Shape = typename Traits::Shape;
  static constexpr bool kDepthMajor = Traits::kBMajor == Major::kDepth;

 public:
  static constexpr int kColumnLoads = FloatColumns<Traits>::kCount;  ///< of four depths

  /// Of a tile with so many row blocks for each warp.
  __device__ __forceinline__ explicit FloatReader(int row_blocks) {
    const int row = warp_row<Shape>(row_blocks) + lane_row<Traits>(0);
    const int col = warp_col<Shape>() + lane_col<Traits>(0);
    a_lane_ = Traits::kAMajor == Major::kDepth ? depth_major_offset<Shape::kDepthBytes>(row, 0)
                                               : row * Traits::kElementBytes;
    b_lane_ = Shape::kRowsBytes + (kDepthMajor ? depth_major_offset<Shape::kDepthBytes>(col, 0)
                                               : col * Traits::kElementBytes);
  }

  /// Depths 4 quad to 4 quad + 3 of row `index` of A, depth major.
  __device__ __forceinline__ float4 row(std::uint32_t stage, int quad, int index) const {
    return ptx::ld_shared_float4(stage + (a_lane_ ^ quad * kChunkBytes) +
                                 index * 8 * Shape::kDepthBytes);
  }

  /// Rows 4 group to 4 group + 3 at one depth of A, outer major.
  __device__ __forceinline__ float4 rows(std::uint32_t stage, int depth, int group) const {
    return ptx::ld_shared_float4(stage + (a_lane_ ^ swizzle(depth)) + group * 8 * kChunkBytes +
                                 depth * Traits::kABytes);
  }

  /// Columns 4 group to 4 group + 3 at one depth of B, outer major. The swizzle reaches the
  /// group's bit, which no lane's offset has.
  __device__ __forceinline__ float4 columns(std::uint32_t stage, int depth, int group) const {
    const int high = swizzle(depth) & 4 * kChunkBytes;
    return ptx::ld_shared_float4(stage + (b_lane_ ^ (swizzle(depth) - high)) +
                                 (group * 4 * kChunkBytes ^ high) + depth * Traits::kBBytes);
  }

  /// Load `index` of kColumnLoads, which together read four depths of B's columns. `AnyBank`: the
  /// first depth into a register of its own.
  template <bool AnyBank>
  __device__ __forceinline__ void load_columns(FloatColumns<Traits>& b, std::uint32_t stage,
                                               int quad, int index) const {
    if constexpr (kDepthMajor) {
      // Column index / 4 * 16 + index % 4 from the lane's first on.
      const int swizzled = (quad ^ (index % 4 >> 1)) * kChunkBytes;
      const std::uint32_t address =
          stage + (b_lane_ ^ swizzled) + (index / 4 * 16 + index % 4) * Shape::kDepthBytes;
      const float4 depths = ptx::ld_shared_float4(address);
      b.values[0][index] = AnyBank ? ptx::ld_shared_float_alone(address) : depths.x;
      b.values[1][index] = depths.y;
      b.values[2][index] = depths.z;
      b.values[3][index] = depths.w;
    } else {
      constexpr int kGroups = kColumnLoads / 4;
      const int depth = index / kGroups, group = index % kGroups;
      const float4 cols = columns(stage, 4 * quad + depth, group);
      b.values[depth][4 * group] = cols.x;
      b.values[depth][4 * group + 1] = cols.y;
      b.values[depth][4 * group + 2] = cols.z;
      b.values[depth][4 * group + 3] = cols.w;
    }
  }

 private:
  static_assert(Shape::kDepthBytes == 64, "the swizzle of a lane's rows and columns");

  static __device__ __forceinline__ constexpr int swizzle(int depth) {
    return outer_major_offset<0, 4>(depth, 0);
  }

  std::uint32_t a_lane_;  ///< offset in a stage of what this lane reads first
  std::uint32_t b_lane_;
};

/// Row `index` of this thread times four depths of its columns.
template <typename Traits>
__device__ __forceinline__ void multiply_row(Accumulators<Traits>& acc, int index, const float4& a,
                                             const FloatColumns<Traits>& b) {
  const float depths[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
  for (int d = 0; d < 4; ++d) {
#pragma unroll
    for (int col = 0; col < FloatColumns<Traits>::kCount; ++col) {
      float& sum = acc[index / 2][col / 2][index % 2 * 2 + col % 2];
      sum = fmaf(depths[d], b.values[d][col], sum);
    }
  }
}

/// Rows of A are contiguous along the contraction: four depths of the columns stay in registers
/// while the rows pass by, the next kAhead of which are on their way.
///
/// Eight depths in a round: the code of two heights, which blocks on a multiprocessor may have at
/// the same time, must fit the instruction cache. With all 16 Qwen3-30B fwd1 ran at 29 TFLOP/s.
///
/// A multiply-add does not wait for its operands if those that are not reused, a sum and a column,
/// come from both banks of the register file: an even and an odd register. The four depths of a
/// 16-byte load lie in even and odd registers by turns, so that a sum moves to the other bank with
/// each depth, which costs nothing. But before the first of four all sums that wait would have to
/// be odd, and 128 are more than half of the registers. With kAnyBank the first depth is loaded
/// once more, by itself, and then half of the columns have it in an odd register.
template <typename Traits, int RowBlocks, typename Feed>
__device__ __forceinline__ void multiply_float_rows(Accumulators<Traits>& acc, Feed& feed,
                                                    int blocks) {
  using Reader = FloatReader<Traits>;
  constexpr int kRows = 2 * RowBlocks;
  constexpr int kAhead = 1;  // with two, ptxas spills on sm_86, sm_89 and sm_120
  constexpr int kQuads = Traits::Shape::kDepthBytes / kChunkBytes;
  // With 64 sums there are odd registers enough.
  constexpr bool kAnyBank = Traits::kAnyBank && kRows * Reader::kColumnLoads > 64;
  static_assert(kQuads % 2 == 0, "the two sets of columns are told apart at compile time");
  static_assert(kRows % kAhead == 0);
  const Reader reader(RowBlocks);
  FloatColumns<Traits> b[2];
  float4 a[kAhead];
  const auto load_columns = [&](int quad, FloatColumns<Traits>& columns) {
#pragma unroll
    for (int i = 0; i < Reader::kColumnLoads; ++i) {
      reader.template load_columns<kAnyBank>(columns, feed.stage_address(), quad, i);
    }
  };
  feed.wait();
  load_columns(0, b[0]);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) a[i] = reader.row(feed.stage_address(), 0, i);
#pragma unroll 1
  for (int left = blocks; left > 0; --left) {
    feed.begin_fill();
    feed.template fill_part<1>(0);
    feed.end_fill();
#pragma unroll 1
    for (int pair = ptx::opaque(0); pair < kQuads; pair += 2) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int quad = pair + odd;
#pragma unroll
        for (int index = 0; index < kRows - kAhead; ++index) {
          multiply_row<Traits>(acc, index, a[index % kAhead], b[odd]);
          a[index % kAhead] = reader.row(feed.stage_address(), quad, index + kAhead);
        }
        // Nothing more is read from a stage when its last rows begin.
        const bool last = odd == 1 && pair + 2 == kQuads;
        const bool more = !last || left > 1;
        if (last) feed.advance();
        if (last && more) feed.wait();
        const int next = last ? 0 : quad + 1;
        if (more) load_columns(next, b[odd ^ 1]);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          multiply_row<Traits>(acc, kRows - kAhead + i, a[i], b[odd]);
          if (more) a[i] = reader.row(feed.stage_address(), next, i);
        }
      }
    }
  }
}

/// Rows and columns of one depth, both contiguous across the contraction.
template <typename Traits>
struct FloatDepth {
  static constexpr int kRows = 2 * Traits::Shape::kRowBlocks;
  static constexpr int kCols = 2 * Traits::Shape::kColBlocks;
  float a[kRows];
  float b[kCols];
  float scale;

  template <bool Scaled>
  __device__ __forceinline__ void load(const FloatReader<Traits>& reader, std::uint32_t stage,
                                       int depth, const float* scales) {
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      const float4 rows = reader.rows(stage, depth, i / 4);
      a[i] = rows.x;
      a[i + 1] = rows.y;
      a[i + 2] = rows.z;
      a[i + 3] = rows.w;
    }
#pragma unroll
    for (int i = 0; i < kCols; i += 4) {
      const float4 cols = reader.columns(stage, depth, i / 4);
      b[i] = cols.x;
      b[i + 1] = cols.y;
      b[i + 2] = cols.z;
      b[i + 3] = cols.w;
    }
    if constexpr (Scaled) scale = scales[depth];
  }

  template <bool Scaled>
  __device__ __forceinline__ void multiply(Accumulators<Traits>& acc) const {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float value = Scaled ? a[row] * scale : a[row];
#pragma unroll
      for (int col = 0; col < kCols; ++col) {
        float& sum = acc[row / 2][col / 2][row % 2 * 2 + col % 2];
        sum = fmaf(value, b[col], sum);
      }
    }
  }
};

template <typename Traits, bool Scaled, typename Feed>
__device__ __forceinline__ void multiply_float_depths(Accumulators<Traits>& acc, Feed& feed,
                                                      int blocks) {
  constexpr int kParts = 4;
  static_assert(Traits::kDepth % kParts == 0);
  const FloatReader<Traits> reader(Traits::Shape::kRowBlocks);
  FloatDepth<Traits> f[2];
  feed.wait();
  f[0].template load<Scaled>(reader, feed.stage_address(), 0, feed.scales());
#pragma unroll 1
  for (int block = 1; block <= blocks; ++block) {
    feed.begin_fill();
#pragma unroll
    for (int depth = 0; depth < Traits::kDepth; ++depth) {
      constexpr int kEvery = Traits::kDepth / kParts;
      if (depth % kEvery == 0) feed.template fill_part<kParts>(depth / kEvery);
      if (depth + 1 < Traits::kDepth) {
        f[(depth + 1) % 2].template load<Scaled>(reader, feed.stage_address(), depth + 1,
                                                 feed.scales());
      } else {
        feed.end_fill();
        feed.advance();
        if (block < blocks) {
          feed.wait();
          f[0].template load<Scaled>(reader, feed.stage_address(), 0, feed.scales());
        }
      }
      f[depth % 2].template multiply<Scaled>(acc);
    }
  }
}

}  // namespace moegemm::cuda::sm80
