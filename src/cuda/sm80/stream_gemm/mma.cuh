#pragma once

#include "cuda/sm80/stream_gemm/load.cuh"

/// A tile: 16 features x up to 8 N rows, one contraction in the order of its groups of 16, as in
/// every other kernel: the bits are theirs. Inside a group the order is the decoder's.
namespace moegemm::cuda::sm80 {

/// Sums of N blocks of eight rows: lane 4 g + t has features g and g + 8 of rows 2 t and 2 t + 1.
template <int N>
using StreamSums = float[N][4];

template <int N>
__device__ __forceinline__ void multiply_group(const std::uint32_t (&a)[4], const uint4 (&rows)[N],
                                               int group, StreamSums<N>& sums) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const std::uint32_t b[2] = {group == 0 ? rows[i].x : rows[i].z,
                                group == 0 ? rows[i].y : rows[i].w};
    ptx::mma_m16n8k16(sums[i], a, b, __nv_bfloat16{});
  }
}

/// One stage. `rows` are where the lane finds its share of the first step, of each block of rows.
template <typename Traits, int N>
class StageProduct {
  using Decoder = StageDecoder<Traits>;
  struct Step {
    typename Decoder::Packed packed;
    uint4 rows[N];
  };

 public:
  __device__ __forceinline__ StageProduct(const Decoder& decoder, std::uint32_t stage,
                                          const std::uint32_t (&rows)[N], StreamSums<N>& sums)
      : decoder_(decoder), stage_(stage), rows_(rows), sums_(sums) {}

  /// All of it.
  __device__ __forceinline__ void multiply() const {
    constexpr int kPairs = Traits::kStageSteps / 2;
    Step even = load(0), odd;  // each requested a step before it is decoded
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const auto scales = decoder_.read_scales(pair);
      odd = load(2 * pair + 1);
      multiply_step<false>(even, scales, 0, 32);
      if (pair + 1 < kPairs) even = load(2 * pair + 2);
      multiply_step<false>(odd, scales, 1, 32);
    }
  }

  /// `bytes` bytes of each row of W. `Rare`: see StageDecoder.
  template <bool Rare>
  __device__ __forceinline__ void multiply_part(int bytes) const {
#pragma unroll 1
    for (int pair = 0; bytes > 0; ++pair, bytes -= 2 * Traits::kStepBytes) {
      const auto scales = decoder_.read_scales(pair);
      multiply_step<Rare>(load(2 * pair), scales, 0, bytes);
      if (bytes > Traits::kStepBytes) {
        multiply_step<Rare>(load(2 * pair + 1), scales, 1, bytes - Traits::kStepBytes);
      }
    }
  }

 private:
  __device__ __forceinline__ Step load(int step) const {
    Step loaded;
    loaded.packed = decoder_.load(stage_, step);
#pragma unroll
    for (int i = 0; i < N; ++i) loaded.rows[i] = ptx::ld_shared_16(rows_[i] + step * 64);
    return loaded;
  }
  template <bool Rare, typename Scales>
  __device__ __forceinline__ void multiply_step(const Step& step, const Scales& scales, int of_pair,
                                                int bytes) const {
    StepWeights a;
    decoder_.template decode<Rare>(step.packed, scales, of_pair, a);
    multiply_group<N>(a[0], step.rows, 0, sums_);
    // fp8: the second group of the last step may be absent.
    if (Traits::kNibbles || bytes > 16) multiply_group<N>(a[1], step.rows, 1, sums_);
  }

  const Decoder& decoder_;
  const std::uint32_t stage_;
  const std::uint32_t (&rows_)[N];
  StreamSums<N>& sums_;
};

/// The low-rank part, whose weights are plain: four neighbours of each lane, straight from device
/// memory, where they are few.
template <int N>
__device__ __forceinline__ void multiply_low_rank(const StreamGemmParams& params,
                                                  const StreamPhase& phase, int feature,
                                                  StreamSums<N>& sums) {
  const int g = lane_id() / 4, last = params.out.cols - 1;
  const std::byte* weights = params.low_weights + phase.expert * params.low_expert_bytes;
#pragma unroll 1
  for (int k = lane_id() % 4 * 4; k < ceil_div(params.low_rank, 16) * 16; k += 16) {
    const bool exists = k < params.low_rank;
    const auto four = [&](const std::byte* row) {
      return exists ? __ldg(reinterpret_cast<const uint2*>(row + k * 2)) : uint2{0, 0};
    };
    const uint2 first = four(weights + min(feature + g, last) * params.low_weight_bytes);
    const uint2 second = four(weights + min(feature + g + 8, last) * params.low_weight_bytes);
    const std::uint32_t a[4] = {first.x, second.x, first.y, second.y};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int row = phase.row + min(8 * i + g, phase.rows - 1);
      const uint2 own = four(params.low_rows + row * params.low_row_bytes);
      const std::uint32_t b[2] = {own.x, own.y};
      ptx::mma_m16n8k16(sums[i], a, b, __nv_bfloat16{});
    }
  }
}

}  // namespace moegemm::cuda::sm80
