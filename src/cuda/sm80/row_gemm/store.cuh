#pragma once

#include <climits>
#include <type_traits>

#include "cuda/device/unnamed_rows.cuh"
#include "cuda/sm80/row_gemm/load.cuh"
#include "cuda/sm80/tile/pipeline.cuh"
#include "cuda/sm80/tile/store.cuh"

/// Where the results of a row GEMM go, what follows the contraction in fp32, and zeros for rows
/// that no tile stores.
namespace moegemm::cuda::sm80 {

/// Targets of one thread: half h of row block i at 2 i + h.
template <typename Traits>
class RowTargets {
  using Shape = typename Traits::Shape;
  static constexpr int kHalves = 2 * Shape::kRowBlocks;

 public:
  int rows[kHalves];
  float scales[kHalves];  ///< set if results are multiplied

  /// By indices in device memory.
  __device__ __forceinline__ void locate(const RowGemmParams& params, const RowTile& tile,
                                         int row_blocks) {
    int flat[kHalves];  // all loads in flight before the first use
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      // Past the tile's height: none.
      const int local = i < 2 * row_blocks ? local_row(row_blocks, i) : Shape::kRows;
      flat[i] = flat_row_of(params, tile, local);
      rows[i] = target_row(params, tile, local, flat[i]);
    }
    if (!params.multiply) return;
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      scales[i] = target_scale<typename Traits::Element>(params, flat[i]);
    }
  }

  /// As the warps that copy have found them, for each row of the tile.
  __device__ __forceinline__ void read(const RowTarget* targets, int row_blocks) {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      const int local = i < 2 * row_blocks ? local_row(row_blocks, i) : 0;
      rows[i] = targets[local].row;
      scales[i] = targets[local].scale;
    }
  }

  __device__ __forceinline__ void scale(Accumulators<Traits>& acc) const {
#pragma unroll
    for (int i = 0; i < Shape::kRowBlocks; ++i) {
#pragma unroll
      for (auto& block : acc[i]) {
#pragma unroll
        for (int h = 0; h < 4; ++h) block[h] *= scales[2 * i + h / 2];
      }
    }
  }

 private:
  static __device__ __forceinline__ int local_row(int row_blocks, int i) {
    return warp_row<Shape>(row_blocks) + lane_row<Traits>(i);
  }
};

/// Adds the bias of the tile's expert to every row.
template <typename Traits>
__device__ __forceinline__ void add_bias(const RowGemmParams& params, const RowTile& tile,
                                         Accumulators<Traits>& acc) {
  using Shape = typename Traits::Shape;
  const int first = tile.feature + warp_col<Shape>() + lane_col<Traits>(0);
  const auto* bias = static_cast<const typename Traits::Element*>(params.bias) +
                     tile.expert * params.bias_stride + first;
  const int left = params.out.cols - first;
#pragma unroll
  for (int j = 0; j < Shape::kColBlocks; ++j) {
    // Where vectors are stored, both columns of a pair exist or none.
    const int col = lane_col<Traits>(j) - lane_col<Traits>(0);
    const bool second = kVectors<Traits> ? col < left : col + 1 < left;
    const float low = col < left ? static_cast<float>(__ldg(bias + col)) : 0.0f;
    const float high = second ? static_cast<float>(__ldg(bias + col + 1)) : 0.0f;
#pragma unroll
    for (int i = 0; i < Shape::kRowBlocks; ++i) {
      acc[i][j][0] += low;
      acc[i][j][1] += high;
      acc[i][j][2] += low;
      acc[i][j][3] += high;
    }
  }
}

/// One row of the output, by a whole warp.
template <typename Traits>
__device__ __forceinline__ void zero_row(const RowGemmParams& params, std::int64_t row) {
  const OutputView& out = params.out;
  const int element_bytes = out.is_fp32 ? 4 : Traits::kElementBytes;
  std::byte* line = static_cast<std::byte*>(out.data) + row * out.stride * element_bytes;
  using Unit = std::conditional_t<kVectors<Traits>, uint2, unsigned short>;  // divides any row
  const std::int64_t units = static_cast<std::int64_t>(out.cols) * element_bytes / sizeof(Unit);
  for (std::int64_t i = lane_id(); i < units; i += kWarpSize) {
    reinterpret_cast<Unit*>(line)[i] = Unit{};
  }
}

/// What UnnamedRows asks.
template <typename Traits>
struct ScatteredOutput {
  using Layout = RowGemmLayout<typename Traits::Shape>;
  const RowGemmParams& params;
  std::byte* shared;

  __device__ __forceinline__ const IndexArray& indices() const { return params.gather_indices; }
  __device__ __forceinline__ int rows() const { return params.scatter ? params.zeroed_rows : 0; }
  __device__ __forceinline__ int routed() const {
    return reinterpret_cast<const SegmentStart*>(shared + Layout::kStarts)[params.experts].row;
  }
  __device__ __forceinline__ unsigned* words() const {
    return reinterpret_cast<unsigned*>(shared + Layout::kNamedRows);
  }
  static __device__ __forceinline__ int word_count() { return Layout::kNamedWords; }
  __device__ __forceinline__ void zero(int row) const { zero_row<Traits>(params, row); }
};

/// In flat order, rows that no position names are zero. By all warps before their first tile, with
/// many loads in flight: spread over the tiles it took all main loops 1 to 2 %. Out of line, where
/// nothing else is in registers yet: the main loops are then compiled as if it were absent. Small
/// tiles have few indices to read, and wait for this code: it is short there.
template <typename Traits>
__device__ __noinline__ void zero_unnamed_rows(const RowGemmParams& params, std::byte* shared) {
  using Output = ScatteredOutput<Traits>;
  using Shape = typename Traits::Shape;
  constexpr int kLoads = Shape::kRows <= 32 ? 2 : 16;
  const Output output = {params, shared};
  UnnamedRows<0, Shape::kThreads, kNamedRowsBarrier, kLoads, Output>(output).advance(INT_MAX);
}

}  // namespace moegemm::cuda::sm80
