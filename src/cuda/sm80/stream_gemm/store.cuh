#pragma once

#include <climits>

#include "cuda/device/element.cuh"
#include "cuda/device/unnamed_rows.cuh"
#include "cuda/sm80/stream_gemm/mma.cuh"

/// What follows the contraction in fp32, where results go, and zeros for rows that no tile stores.
namespace moegemm::cuda::sm80 {

/// Results are few: element by element, eight lanes next to each other.
template <int N>
__device__ __forceinline__ void store_sums(const StreamGemmParams& params, const StreamPhase& phase,
                                           const StreamTarget* targets, int feature,
                                           const StreamSums<N>& sums) {
  const OutputView& out = params.out;
  const int first = feature + lane_id() / 4;
  float bias[2] = {};
  if (params.bias) {
    const auto* line =
        static_cast<const __nv_bfloat16*>(params.bias) + phase.expert * params.bias_stride;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      bias[h] = static_cast<float>(__ldg(line + min(first + 8 * h, out.cols - 1)));
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int local = 8 * i + lane_id() % 4 * 2 + j;
      if (local >= phase.rows) continue;
      const StreamTarget target = targets[phase.slot + local];
      if (target.row < 0) continue;
      const std::int64_t line = target.row * out.stride;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (first + 8 * h >= out.cols) continue;
        float sum = sums[i][2 * h + j];
        if (params.bias) sum += bias[h];
        if (params.multiply) sum *= target.scale;
        const std::int64_t at = line + first + 8 * h;
        if (out.is_fp32) {
          static_cast<float*>(out.data)[at] = sum;
        } else {
          round_to(static_cast<__nv_bfloat16*>(out.data)[at], sum);
        }
      }
    }
  }
}

/// One row of the output, by a whole warp.
__device__ __forceinline__ void zero_stream_row(const StreamGemmParams& params, std::int64_t row) {
  const OutputView& out = params.out;
  for (int column = lane_id(); column < out.cols; column += kWarpSize) {
    if (out.is_fp32) {
      static_cast<float*>(out.data)[row * out.stride + column] = 0.0f;
    } else {
      static_cast<unsigned short*>(out.data)[row * out.stride + column] = 0;
    }
  }
}

/// What UnnamedRows asks.
template <typename Traits>
struct StreamOutput {
  using Layout = StreamLayout<Traits>;
  const StreamGemmParams& params;
  std::byte* shared;

  __device__ __forceinline__ const IndexArray& indices() const { return params.gather_indices; }
  __device__ __forceinline__ int rows() const { return params.zeroed_rows; }
  __device__ __forceinline__ int routed() const {
    return reinterpret_cast<const SegmentStart*>(shared + Layout::kStarts)[params.experts].row;
  }
  __device__ __forceinline__ unsigned* words() const {
    return reinterpret_cast<unsigned*>(shared + Layout::kNamedRows);
  }
  static __device__ __forceinline__ int word_count() { return kStreamNamedWords; }
  __device__ __forceinline__ void zero(int row) const { zero_stream_row(params, row); }
};

constexpr int kStreamBarrier = 1;  ///< named, of the scan and of the rows that nobody names

/// Rows that no tile stores. Out of line: the main loop is compiled as if it were absent.
template <typename Traits>
__device__ __noinline__ void zero_other_rows(const StreamGemmParams& params, std::byte* shared) {
  const StreamOutput<Traits> output = {params, shared};
  if (params.scatter) {
    UnnamedRows<0, Traits::kThreads, kStreamBarrier, 2, StreamOutput<Traits>>(output).advance(
        INT_MAX);
  } else {
    zero_padding_rows<Traits::kWarps>(params, output.routed(), warp_id(),
                                      [&](long long row) { zero_stream_row(params, row); });
  }
}

}  // namespace moegemm::cuda::sm80
