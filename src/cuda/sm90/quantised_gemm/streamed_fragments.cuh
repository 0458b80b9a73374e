#pragma once

#include "cuda/sm90/quantised_gemm/scales.cuh"

/// wgmma's register operand in streaming tiles of forward: consumers load the scales themselves.
namespace moegemm::cuda::sm90 {

/// Of one consumer warpgroup and one tile. Loads of scales are in flight for a whole stage.
template <typename Traits>
class StreamedFragments {
  static constexpr WeightFormat kFormat = Traits::kKernel.weights;
  static constexpr int kBits = Traits::kKernel.weight_bits();
  static constexpr int kHalves = 2 * Traits::kPanels;
  static constexpr int kPanelRow = Traits::kStageDepth * kBits / 8;  ///< bytes
  using D = Decoder<kFormat>;

 public:
  __device__ __forceinline__ StreamedFragments(const RowGemmParams& params,
                                               const RowGemmShared<Traits>& shared,
                                               const Tile& tile, int consumer)
      : source_(params.scales, tile.expert), type_(params.scales.type), depth_(params.depth) {
    const int lane = threadIdx.x % kWarpSize;
    const int row = consumer * 64 + threadIdx.x / kWarpSize % 4 * 16 + lane / 4;
    row_ = row * kPanelRow;
    chunk_ = row / (128 / kPanelRow) % (kPanelRow / 16);
    const int last = params.features - 1;  // rows past it are not stored
    scale_rows_[0] = source_.row(min(tile.feature + row, last));
    scale_rows_[1] = source_.row(min(tile.feature + row + 8, last));
    if constexpr (kFormat == WeightFormat::kNf4) {
      selector_ = D::turn(lane % 4);
      table_ = shared.decode_tables() + lane % 16 * 8;
    } else {
      selector_ = D::forward_selector(lane % 4);
    }
    load_scales(0);
  }

  /// The stage's scales are those that were loaded; the next stage's are requested.
  __device__ __forceinline__ void next_scales(int block) {
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) scales_[i / 2][i % 2] = loaded_[i / 2][i % 2];
    if constexpr (kFormat == WeightFormat::kMxfp4) clip_scales(block);
    load_scales((block + 1) * Traits::kStageDepth);
  }

  /// fp8 has twice the bytes, and no registers for them: it loads while it decodes.
  template <int Half>
  __device__ __forceinline__ void load(const RowGemmShared<Traits>& shared, int slot) {
    panel_ = shared.weights(slot) + row_;
    if constexpr (kBits == 4) {
#pragma unroll
      for (int h = 0; h < 2; ++h) packed_[h] = chunk_of(Half, h);
    }
  }

  template <int Half>
  __device__ __forceinline__ void decode(HalfStage& a) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto scale = decoder_scale<kFormat>(scales_[Half][h], type_);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint4 chunk = kBits == 4 ? packed_[h] : chunk_of(2 * Half + step, h);
        a[step][h] = pair(chunk, step, 0, scale);
        a[step][h + 2] = pair(chunk, step, 1, scale);
      }
    }
    if constexpr (kFormat == WeightFormat::kMxfp4) {
      if (clipped_ >= 0) multiply_excess(a, clipped_ + Half * kHalfDepth);
    }
  }

 private:
  __device__ __forceinline__ void load_scales(int k) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int at = k + half * kHalfDepth;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // Past the depth the rows are zeros: any finite scale will do.
        loaded_[half][h] = at < depth_ ? source_.template load<kFormat>(scale_rows_[h], at) : 0;
      }
    }
  }

  __device__ __forceinline__ uint4 chunk_of(int chunk, int h) const {
    return *reinterpret_cast<const uint4*>(panel_ + ((chunk ^ chunk_) << 4) + h * 8 * kPanelRow);
  }

  template <typename Scale>
  __device__ __forceinline__ std::uint32_t pair(const uint4& chunk, int step, int u,
                                                Scale scale) const {
    if constexpr (kBits == 8) {
      return D::forward(u == 0 ? chunk.x : chunk.z, u == 0 ? chunk.y : chunk.w, selector_, scale);
    } else {
      const std::uint32_t word =
          step == 0 ? (u == 0 ? chunk.x : chunk.y) : (u == 0 ? chunk.z : chunk.w);
      if constexpr (kFormat == WeightFormat::kNf4) {
        return D::forward(table_, word, selector_, scale);
      } else {
        return D::forward(word, selector_, scale);
      }
    }
  }

  /// Scales that need two products are rare: they are loaded once more where there are any.
  __device__ __forceinline__ void clip_scales(int block) {
    std::uint32_t all = 0;
#pragma unroll
    for (const auto& half : scales_) all |= half[0] | half[1];
    clipped_ = -1;
    if (__any_sync(kFullMask, all >= D::kMost)) {
      clipped_ = block * Traits::kStageDepth;
#pragma unroll
      for (auto& half : scales_) {
        half[0] = min(half[0], D::kMost);
        half[1] = min(half[1], D::kMost);
      }
    }
  }
  __device__ __forceinline__ void multiply_excess(HalfStage& a, int k) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::uint32_t byte = k < depth_ ? source_.template load<kFormat>(scale_rows_[h], k) : 0;
      const std::uint32_t factors = D::excess(byte) * 0x00010001u;
#pragma unroll
      for (int i = h; i < 8; i += 2) {
        a[i / 4][i % 4] = ptx::mul_rn_bf16x2(a[i / 4][i % 4], factors);
      }
    }
  }

  ScaleSource source_;
  ScaleType type_;
  int depth_;
  int clipped_;  ///< where the stage begins if scales were clipped, else -1
  int row_;      ///< byte offset in a panel
  int chunk_;    ///< what the swizzle adds to its chunks
  int scale_rows_[2];
  std::uint32_t selector_;
  const std::byte* table_;
  std::uint32_t loaded_[kHalves][2];
  std::uint32_t scales_[kHalves][2];  ///< [half][h]
  const std::byte* panel_;            ///< the thread's row
  uint4 packed_[2];                   ///< [h]
};

}  // namespace moegemm::cuda::sm90
