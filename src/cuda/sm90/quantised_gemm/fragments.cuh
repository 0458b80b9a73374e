#pragma once

#include "cuda/ptx/mma_sync.cuh"
#include "cuda/sm90/quantised_gemm/decode.cuh"
#include "cuda/sm90/row_gemm/params.h"

/// wgmma's register operand from packed weights. A stage is decoded in two halves of 32 of the
/// contraction, two k16 steps each: the tensor cores read one half while the other is decoded.
namespace moegemm::cuda::sm90 {

/// The registers of a half: lane 4 g + t of warp w has [step][h + 2 u], features 16 w + g + 8 h
/// (or Traits::feature_of) at depth 2 t + 8 u and the next.
using HalfStage = std::uint32_t[2][4];

constexpr int kHalfDepth = 32;

/// Byte offset of a 16-byte chunk in rows of `Bytes` as TMA swizzles them: groups of eight chunks
/// that lie together are permuted by the rows' place in 1024 bytes.
template <int Bytes>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  static_assert(Bytes == 32 || Bytes == 64 || Bytes == 128);
  constexpr int kRowsPerLine = 128 / Bytes;
  constexpr int kChunks = Bytes / 16;
  return row * Bytes + ((chunk ^ (row / kRowsPerLine % kChunks)) << 4);
}

/// Where a tile's scales are.
struct ScaleSource {
  const std::byte* expert;
  const WeightScales& scales;

  __device__ __forceinline__ ScaleSource(const WeightScales& of, int number)
      : expert(of.data + number * of.expert_scales * of.bytes), scales(of) {}
  __device__ __forceinline__ int row(int n) const {
    return (n >> scales.row_shift) * scales.row_scales;
  }
  template <WeightFormat F>
  __device__ __forceinline__ std::uint32_t load(int row, int k) const {
    const int index = row + (F == WeightFormat::kMxfp4 ? k >> 5 : k >> scales.column_shift);
    if constexpr (F == WeightFormat::kFp8) {
      return load_scale(expert, scales.type, index);
    } else {
      return __ldg(reinterpret_cast<const typename Decoder<F>::Loaded*>(expert) + index);
    }
  }
};

/// The scale as the decoder takes it: bf16 twice, or fp32.
template <WeightFormat F>
__device__ __forceinline__ auto decoder_scale(std::uint32_t loaded, ScaleType type) {
  using D = Decoder<F>;
  if constexpr (D::kBf16Scales) {
    return D::factors(loaded);
  } else {
    return F == WeightFormat::kNf4 ? __uint_as_float(loaded) : scale_value(loaded, type);
  }
}

/// Of one consumer warpgroup and one tile. Loads of scales are in flight for a whole stage.
template <typename Traits, bool Forward = Traits::kDepthMajor>
class Fragments;

/// Forward: a row of W is a row of a fragment. Eight packed values are four pairs, one for each
/// thread of a quad: all four load the same 16 bytes.
template <typename Traits>
class Fragments<Traits, true> {
  static constexpr WeightFormat kFormat = Traits::kKernel.weights;
  static constexpr int kBits = Traits::kKernel.weight_bits();
  static constexpr int kHalves = 2 * Traits::kPanels;
  static constexpr int kPanelRow = Traits::kStageDepth * kBits / 8;  ///< bytes
  using D = Decoder<kFormat>;

 public:
  __device__ __forceinline__ Fragments(const RowGemmParams& params,
                                       const RowGemmShared<Traits>& shared, const Tile& tile,
                                       int consumer)
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
  __device__ __forceinline__ void load(const std::byte* panel) {
    panel_ = panel + row_;
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
        a[i / 4][i % 4] = multiply_bf16x2(a[i / 4][i % 4], factors);
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

/// dX: a row of W is a step of the contraction. ldmatrix gives a thread 16 bits of two neighbouring
/// rows: the packed values of four columns, of which its warp takes two, or of two in fp8. Each row
/// has scales of its own: a lane loads that of one row, and the warp exchanges them through shared
/// memory.
template <typename Traits>
class Fragments<Traits, false> {
  static constexpr WeightFormat kFormat = Traits::kKernel.weights;
  static constexpr int kBits = Traits::kKernel.weight_bits();
  static constexpr int kPanelRow = Traits::kFeatures * kBits / 8;  ///< bytes
  using D = Decoder<kFormat>;

 public:
  __device__ __forceinline__ Fragments(const RowGemmParams& params,
                                       const RowGemmShared<Traits>& shared, const Tile& tile,
                                       int consumer)
      : source_(params.scales, tile.expert), type_(params.scales.type), depth_(params.depth) {
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize % 4;
    const int chunk = kBits == 8 ? consumer * 4 + warp : consumer * 2 + warp / 2;
    row_ = swizzled<kPanelRow>(lane, chunk);  // 32 rows further on the swizzle is the same
    column_ =
        min(tile.feature + consumer * 64 + Traits::feature_of(warp, 0, 0), params.features - 1);
    std::byte* tables = shared.decode_tables();
    if constexpr (kFormat == WeightFormat::kNf4) {
      selector_ = D::turn(warp % 2);
      table_ = tables + lane % 16 * 8;
      tables += kPairTableBytes;
    } else if constexpr (kBits == 4) {
      selector_ = D::dx_selector(warp % 2);
    }
    exchange_ = tables + (consumer * 4 + warp) * kScaleTableBytes;
    load_scales(0);
    next_scales(-1);
  }

  /// Two stages ahead: rows of W are far apart in memory.
  __device__ __forceinline__ void next_scales(int block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scales_[half] = next_[half];
      next_[half] = loaded_[half];
    }
    if constexpr (kFormat == WeightFormat::kMxfp4) {
      clipped_ = -1;
      if (__any_sync(kFullMask, (scales_[0] | scales_[1]) >= D::kMost)) {
        clipped_ = block * kDepth;
        scales_[0] = min(scales_[0], D::kMost);
        scales_[1] = min(scales_[1], D::kMost);
      }
    }
    load_scales((block + 2) * kDepth);
  }

  template <int Half>
  __device__ __forceinline__ void load(const std::byte* panel) {
    std::uint32_t(&r)[4] = packed_[Half];
    ptx::ldmatrix_x4_trans(ptx::shared_address(panel) + row_ + Half * kHalfDepth * kPanelRow, r[0],
                           r[1], r[2], r[3]);
  }

  template <int Half>
  __device__ __forceinline__ void decode(HalfStage& a) const {
    const int lane = threadIdx.x % kWarpSize;
    // Row 8 q + 2 t + e of the half is entry [t][q][e].
    const int entry = (lane / 2 % 4 * 4 + lane / 8) * 2 + lane % 2;
    const auto scale = decoder_scale<kFormat>(scales_[Half], type_);
    if constexpr (D::kBf16Scales) {
      reinterpret_cast<std::uint16_t*>(exchange_)[Half * 32 + entry] =
          static_cast<std::uint16_t>(scale);
      __syncwarp();
      const uint4 of_rows = reinterpret_cast<const uint4*>(exchange_)[Half * 4 + lane % 4];
      const std::uint32_t pairs[4] = {of_rows.x, of_rows.y, of_rows.z, of_rows.w};
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        D::dx(packed_[Half][q], selector_, pairs[q], a[q / 2][q % 2 * 2], a[q / 2][q % 2 * 2 + 1]);
      }
      if constexpr (kFormat == WeightFormat::kMxfp4) {
        if (clipped_ >= 0) multiply_excess(a, clipped_ + Half * kHalfDepth);
      }
    } else {
      reinterpret_cast<float*>(exchange_)[Half * 32 + entry] = scale;
      __syncwarp();
      const float4* of_rows = reinterpret_cast<const float4*>(exchange_) + Half * 8 + lane % 4 * 2;
#pragma unroll
      for (int q = 0; q < 4; q += 2) {
        const float4 both = of_rows[q / 2];
        dx(q, Half, {both.x, both.y}, a);
        dx(q + 1, Half, {both.z, both.w}, a);
      }
    }
  }

 private:
  /// Of the lane's row of 32. Rows past the last are zeros in both operands: any finite scale will
  /// do.
  __device__ __forceinline__ std::uint32_t load_scale_of(int n) const {
    const int row = n + threadIdx.x % kWarpSize;
    return row < depth_ ? source_.template load<kFormat>(source_.row(row), column_) : 0;
  }
  __device__ __forceinline__ void load_scales(int n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) loaded_[half] = load_scale_of(n + half * kHalfDepth);
  }

  __device__ __forceinline__ void dx(int q, int half, float2 scales, HalfStage& a) const {
    std::uint32_t& first = a[q / 2][q % 2 * 2];
    std::uint32_t& second = a[q / 2][q % 2 * 2 + 1];
    if constexpr (kBits == 8) {
      D::dx(packed_[half][q], scales, first, second);
    } else {
      D::dx(table_, packed_[half][q], selector_, scales, first, second);
    }
  }

  __device__ __forceinline__ void multiply_excess(HalfStage& a, int n) const {
    const std::uint32_t own = D::excess(load_scale_of(n));
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const std::uint32_t pair = __shfl_sync(kFullMask, own, 8 * q + 2 * t) |
                                 __shfl_sync(kFullMask, own, 8 * q + 2 * t + 1) << 16;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        std::uint32_t& value = a[q / 2][q % 2 * 2 + h];
        value = multiply_bf16x2(value, pair);
      }
    }
  }

  ScaleSource source_;
  ScaleType type_;
  int depth_;
  int clipped_;  ///< where the stage begins if scales were clipped, else -1
  int row_;      ///< byte offset of the lane's row and chunk in a panel
  int column_;   ///< any of the warp's, whose scale is the same
  std::uint32_t selector_;
  const std::byte* table_;
  std::byte* exchange_;
  std::uint32_t loaded_[2];
  std::uint32_t next_[2];
  std::uint32_t scales_[2];  ///< [half]
  std::uint32_t packed_[2][4];
};

}  // namespace moegemm::cuda::sm90
