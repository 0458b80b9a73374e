#pragma once

#include "cuda/ptx/mma_sync.cuh"
#include "cuda/sm80/stream_gemm/load.cuh"

/// A tile: 16 features x up to 8 N rows, one contraction in the order of its groups of 16, as in
/// every other kernel: the bits are theirs. Inside a group the order is the decoder's.
namespace moegemm::cuda::sm80 {

/// mma.sync's fragments of W: [group of the step][register].
using StepWeights = std::uint32_t[2][4];

/// Decodes a stage. begin() is given its scales, after all lanes have left the stage before.
template <typename Traits>
class StageDecoder;

/// mxfp4 and int4: 16 bytes of a row are a step, which all lanes of a quad load.
template <typename Traits>
  requires(Traits::kFormat == WeightFormat::kMxfp4 || Traits::kFormat == WeightFormat::kInt4)
class StageDecoder<Traits> {
  using Quad = typename ScalesOf<Traits::kFormat>::Quad;
  using Scales = typename ScalesOf<Traits::kFormat>::Type;

 public:
  __device__ __forceinline__ explicit StageDecoder(std::byte* table)
      : table_(table), selector_(Quad::selector_of(lane_id() % 4)) {}

  __device__ __forceinline__ bool begin(const StreamGemmParams& params,
                                        const typename Scales::Loaded& scales) {
    const bool excess = Scales::publish(params, table_, scales);
    __syncwarp();
    return excess;
  }

  /// `Rare`: any step, scales that need two products too. Else steps come in order.
  template <bool Rare>
  __device__ __forceinline__ void decode(const std::byte* stage, int step, bool excess,
                                         StepWeights& a) {
    if (Rare || step % 4 == 0) factors_ = Scales::read(table_, step / 4);
    const int g = lane_id() / 4;
    const std::byte* own = stage + g * kStreamRowBytes + ((step ^ g) << 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 packed = *reinterpret_cast<const uint4*>(own + h * 8 * kStreamRowBytes);
      const std::uint32_t factors = Scales::pick(factors_.of[h], step);
      std::uint32_t pairs[2][2];
      Quad::decode(packed.x, packed.y, selector_, factors, pairs[0]);
      Quad::decode(packed.z, packed.w, selector_, factors, pairs[1]);
      if constexpr (Rare && Traits::kFormat == WeightFormat::kMxfp4) {
        if (excess) {
          const std::uint32_t more =
              Scales::pick(Scales::read_excess(table_, step / 4).of[h], step);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            pairs[i / 2][i % 2] = multiply_pairs(pairs[i / 2][i % 2], more, __nv_bfloat16{});
          }
        }
      }
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        a[group][h] = pairs[group][0];
        a[group][2 + h] = pairs[group][1];
      }
    }
  }

 private:
  std::byte* table_;
  std::uint32_t selector_;
  typename Scales::Factors factors_;
};

template <typename Traits>
  requires(Traits::kFormat == WeightFormat::kNf4)
class StageDecoder<Traits> {
 public:
  __device__ __forceinline__ explicit StageDecoder(std::byte* table)
      : table_(table), selector_(Nf4Quad::selector_of(lane_id() % 4)) {}

  __device__ __forceinline__ bool begin(const StreamGemmParams& params,
                                        const ProductScales::Loaded& scales) {
    ProductScales::publish(params, table_, scales);
    __syncwarp();
    return false;
  }

  template <bool Rare>
  __device__ __forceinline__ void decode(const std::byte* stage, int step, bool, StepWeights& a) {
    const int g = lane_id() / 4;
    const std::byte* own = stage + g * kStreamRowBytes + ((step ^ g) << 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 packed = *reinterpret_cast<const uint4*>(own + h * 8 * kStreamRowBytes);
      const Nf4Products products = ProductScales::read(table_, h, step / 2);
      std::uint32_t pairs[2];
      Nf4Quad::decode(packed.x, packed.y, selector_, products, pairs);
      a[0][h] = pairs[0];
      a[0][2 + h] = pairs[1];
      Nf4Quad::decode(packed.z, packed.w, selector_, products, pairs);
      a[1][h] = pairs[0];
      a[1][2 + h] = pairs[1];
    }
  }

 private:
  std::byte* table_;
  std::uint32_t selector_;
};

/// fp8: 16 bytes are a group of 16, of which ldmatrix gives each lane its four.
template <typename Traits>
  requires(Traits::kFormat == WeightFormat::kFp8)
class StageDecoder<Traits> {
 public:
  __device__ __forceinline__ explicit StageDecoder(std::byte*) {}

  __device__ __forceinline__ bool begin(const StreamGemmParams& params,
                                        const FloatScales::Loaded& scales) {
    scales_[0] = FloatScales::value(params, scales.of[0]);
    scales_[1] = FloatScales::value(params, scales.of[1]);
    return false;
  }

  template <bool Rare>
  __device__ __forceinline__ void decode(const std::byte* stage, int step, bool, StepWeights& a) {
    // Matrices: rows 0 to 7 and 8 to 15 of a chunk, then of the next.
    const int row = lane_id() % 16;
    const int chunk = (2 * step + lane_id() / 16) ^ (row % 8);
    std::uint32_t words[2][2];  // [group][h]
    ptx::ldmatrix_x4(ptx::shared_address(stage + row * kStreamRowBytes + (chunk << 4)),
                     words[0][0], words[0][1], words[1][0], words[1][1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint32_t pairs[2];
      Fp8Quad::decode(words[i / 2][i % 2], scales_[i % 2], pairs);
      a[i / 2][i % 2] = pairs[0];
      a[i / 2][2 + i % 2] = pairs[1];
    }
  }

 private:
  float scales_[2];
};

/// Sums of N blocks of eight rows: lane 4 g + t has features g and g + 8 of rows 2 t and 2 t + 1.
template <int N>
using StreamSums = float[N][4];

template <int N>
__device__ __forceinline__ void multiply_group(const std::uint32_t (&a)[4],
                                               const uint4 (&rows)[N], int group,
                                               StreamSums<N>& sums) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const std::uint32_t b[2] = {group == 0 ? rows[i].x : rows[i].z,
                                group == 0 ? rows[i].y : rows[i].w};
    ptx::mma_m16n8k16(sums[i], a, b, __nv_bfloat16{});
  }
}

/// A stage of `bytes` bytes of each row of W. `rows` are where the lane finds its share of the
/// stage's first step, of each block of rows.
template <typename Traits, int N>
__device__ __forceinline__ void multiply_stage(StageDecoder<Traits>& decoder, bool excess,
                                               const std::byte* stage, int bytes,
                                               const std::byte* const (&rows)[N],
                                               StreamSums<N>& sums) {
  const auto load = [&](int step, uint4(&own)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) own[i] = *reinterpret_cast<const uint4*>(rows[i] + step * 64);
  };
  if (bytes >= kStreamRowBytes && !excess) {
#pragma unroll
    for (int step = 0; step < Traits::kStageSteps; ++step) {
      uint4 own[N];
      StepWeights a;
      load(step, own);
      decoder.template decode<false>(stage, step, false, a);
      multiply_group<N>(a[0], own, 0, sums);
      multiply_group<N>(a[1], own, 1, sums);
    }
    return;
  }
#pragma unroll 1
  for (int step = 0; step < Traits::kStageSteps && step * Traits::kStepBytes < bytes; ++step) {
    uint4 own[N];
    StepWeights a;
    load(step, own);
    decoder.template decode<true>(stage, step, excess, a);
    multiply_group<N>(a[0], own, 0, sums);
    // fp8: the second group of the last step may be absent.
    if (Traits::kNibbles || step * Traits::kStepBytes + 16 < bytes) {
      multiply_group<N>(a[1], own, 1, sums);
    }
  }
}

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
