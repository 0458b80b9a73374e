#pragma once

#include "cuda/ptx/mma_sync.cuh"
#include "cuda/sm90/quantised_gemm/scales.cuh"

/// wgmma's register operand from packed weights, by one consumer warpgroup for one tile. A stage is
/// decoded in two halves of 32 of the contraction, two k16 steps each: the tensor cores read one
/// half while the other is decoded. Scales come with the stage (scales.cuh).
namespace moegemm::cuda::sm90 {

/// Byte offset of a 16-byte chunk in rows of `Bytes` as TMA swizzles them: groups of eight chunks
/// that lie together are permuted by the rows' place in 1024 bytes.
template <int Bytes>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  static_assert(Bytes == 32 || Bytes == 64 || Bytes == 128);
  constexpr int kRowsPerLine = 128 / Bytes;
  constexpr int kChunks = Bytes / 16;
  return row * Bytes + ((chunk ^ (row / kRowsPerLine % kChunks)) << 4);
}

/// mxfp4: whether a stage has scales that one product does not hold.
template <typename Traits>
__device__ __forceinline__ bool table_has_excess(const std::byte* table) {
  return __any_sync(
      kFullMask, *reinterpret_cast<const std::uint32_t*>(table + ScaleTable<Traits>::kFlags) != 0);
}

template <typename Traits, bool Forward = Traits::kDepthMajor>
class Fragments;

/// Forward: a row of W is a row of a fragment. Eight packed values are four pairs, one for each
/// thread of a quad: all four load the same 16 bytes.
template <typename Traits>
class Fragments<Traits, true> {
  static constexpr WeightFormat kFormat = Traits::kKernel.weights;
  static constexpr int kBits = Traits::kKernel.weight_bits();
  static constexpr int kPanelRow = kDepth * kBits / 8;  ///< bytes
  static constexpr bool kLooksUp = kFormat == WeightFormat::kNf4;
  using D = Decoder<kFormat>;

 public:
  __device__ __forceinline__ Fragments(const RowGemmParams&, const RowGemmShared<Traits>&,
                                       const Tile&, int consumer) {
    const int lane = threadIdx.x % kWarpSize;
    const int row = consumer * 64 + threadIdx.x / kWarpSize % 4 * 16 + lane / 4;
    row_ = ptx::opaque(static_cast<std::uint32_t>(swizzled<kPanelRow>(row, 0)));
    entry_ = ptx::opaque(static_cast<std::uint32_t>(row * (kLooksUp ? 16 : 8)));
    selector_ = ptx::opaque(D::forward_selector(lane % 4));
  }

  /// The weights of a half, and with the first one the stage's scales. fp8 has twice the bytes, and
  /// no registers for them: it loads while it decodes.
  template <int Half>
  __device__ __forceinline__ void load(const RowGemmShared<Traits>& shared, int slot) {
    panel_ = shared.weights(slot);
    if constexpr (kBits == 4) {
#pragma unroll
      for (int h = 0; h < 2; ++h) packed_[h] = chunk_of(Half, h);
    }
    table_ = shared.scale_table(slot);
    if constexpr (Half == 0 && !kLooksUp) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        scales_[h] = *reinterpret_cast<const uint2*>(table_ + entry_ + h * 64);
      }
    }
    if constexpr (Half == 0 && kFormat == WeightFormat::kMxfp4) {
      excess_ = table_has_excess<Traits>(table_);
    }
  }

  /// Whether the stage that was loaded needs multiply_excess.
  __device__ __forceinline__ bool has_excess() const {
    return kFormat == WeightFormat::kMxfp4 && excess_;
  }

  template <int Half>
  __device__ __forceinline__ void decode(HalfStage& a) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kLooksUp) {
        const auto* low = reinterpret_cast<const uint4*>(table_ + entry_ + h * 128);
        D::forward(packed_[h], selector_, low[0], low[128], a[0][h], a[0][h + 2], a[1][h],
                   a[1][h + 2]);
      } else {
        const std::uint32_t bits = Half == 0 ? scales_[h].x : scales_[h].y;
        const auto scale = [&] {
          if constexpr (D::kBf16Scales)
            return bits;
          else
            return __uint_as_float(bits);
        }();
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint4 chunk = kBits == 4 ? packed_[h] : chunk_of(2 * Half + step, h);
          a[step][h] = pair(chunk, step, 0, scale);
          a[step][h + 2] = pair(chunk, step, 1, scale);
        }
      }
    }
  }

  template <int Half>
  __device__ __forceinline__ void multiply_excess(HalfStage& a) const {
    const std::byte* excess = table_ + ScaleTable<Traits>::kExcess + entry_ / 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto both = *reinterpret_cast<const std::uint32_t*>(excess + h * 32);
      const std::uint32_t factors = __byte_perm(both, 0, Half == 0 ? 0x1010 : 0x3232);
#pragma unroll
      for (int i = h; i < 8; i += 2) {
        a[i / 4][i % 4] = ptx::mul_rn_bf16x2(a[i / 4][i % 4], factors);
      }
    }
  }

 private:
  __device__ __forceinline__ uint4 chunk_of(int chunk, int h) const {
    return *reinterpret_cast<const uint4*>(panel_ + (row_ ^ (chunk << 4)) + h * 8 * kPanelRow);
  }

  template <typename Scale>
  __device__ __forceinline__ std::uint32_t pair(const uint4& chunk, int step, int u,
                                                Scale scale) const {
    if constexpr (kBits == 8) {
      return D::forward(u == 0 ? chunk.x : chunk.z, u == 0 ? chunk.y : chunk.w, selector_, scale);
    } else {
      const std::uint32_t word =
          step == 0 ? (u == 0 ? chunk.x : chunk.y) : (u == 0 ? chunk.z : chunk.w);
      return D::forward(word, selector_, scale);
    }
  }

  std::uint32_t row_;    ///< byte offset in a panel
  std::uint32_t entry_;  ///< and in a table
  std::uint32_t selector_;
  bool excess_;
  const std::byte* panel_;
  const std::byte* table_;
  uint2 scales_[2];  ///< [h], of both halves
  uint4 packed_[2];  ///< [h]
};

/// dX: a row of W is a step of the contraction. ldmatrix gives a thread 16 bits of two neighbouring
/// rows: the packed values of four columns, of which its warp takes two, or of two in fp8.
template <typename Traits>
class Fragments<Traits, false> {
  static constexpr WeightFormat kFormat = Traits::kKernel.weights;
  static constexpr int kBits = Traits::kKernel.weight_bits();
  static constexpr int kPanelRow = Traits::kFeatures * kBits / 8;  ///< bytes
  using D = Decoder<kFormat>;
  using Table = ScaleTable<Traits>;
  static constexpr int kHalfTable = 32 * Table::kEntry;  ///< bytes

 public:
  __device__ __forceinline__ Fragments(const RowGemmParams&, const RowGemmShared<Traits>& shared,
                                       const Tile&, int consumer) {
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize % 4;
    const int chunk = kBits == 8 ? consumer * 4 + warp : consumer * 2 + warp / 2;
    // 32 rows further on the swizzle is the same.
    row_ = ptx::opaque(static_cast<std::uint32_t>(swizzled<kPanelRow>(lane, chunk)));
    const int columns = consumer * 2 + warp / 2;
    entry_ = ptx::opaque(static_cast<std::uint32_t>((columns * 64 + lane % 4 * 8) * Table::kEntry));
    if constexpr (kFormat == WeightFormat::kNf4) {
      selector_ = D::turn(warp % 2);
      values_ = shared.decode_tables() + lane % 16 * 8;
    } else if constexpr (kBits == 4) {
      selector_ = ptx::opaque(D::dx_selector(warp % 2));
    }
  }

  template <int Half>
  __device__ __forceinline__ void load(const RowGemmShared<Traits>& shared, int slot) {
    ptx::ldmatrix_x4_trans(
        ptx::shared_address(shared.weights(slot)) + row_ + Half * kHalfDepth * kPanelRow,
        packed_[0], packed_[1], packed_[2], packed_[3]);
    table_ = shared.scale_table(slot) + entry_;
    if constexpr (Table::kEntry == 2) {
      scales_ = *reinterpret_cast<const uint4*>(table_ + Half * kHalfTable);
    }
    if constexpr (Half == 0 && kFormat == WeightFormat::kMxfp4) {
      excess_ = table_has_excess<Traits>(shared.scale_table(slot));
    }
  }

  /// Whether the stage that was loaded needs multiply_excess.
  __device__ __forceinline__ bool has_excess() const {
    return kFormat == WeightFormat::kMxfp4 && excess_;
  }

  template <int Half>
  __device__ __forceinline__ void decode(HalfStage& a) const {
    if constexpr (Table::kEntry == 2) {
      const std::uint32_t pairs[4] = {scales_.x, scales_.y, scales_.z, scales_.w};
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        D::dx(packed_[q], selector_, pairs[q], a[q / 2][q % 2 * 2], a[q / 2][q % 2 * 2 + 1]);
      }
    } else {
      const auto* of_rows = reinterpret_cast<const float4*>(table_ + Half * kHalfTable);
#pragma unroll
      for (int q = 0; q < 4; q += 2) {
        const float4 both = of_rows[q / 2];
        dx(q, {both.x, both.y}, a);
        dx(q + 1, {both.z, both.w}, a);
      }
    }
  }

  template <int Half>
  __device__ __forceinline__ void multiply_excess(HalfStage& a) const {
    const uint4 of_rows =
        *reinterpret_cast<const uint4*>(table_ + Table::kExcess + Half * kHalfTable);
    const std::uint32_t pairs[4] = {of_rows.x, of_rows.y, of_rows.z, of_rows.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      a[i / 4][i % 4] = ptx::mul_rn_bf16x2(a[i / 4][i % 4], pairs[i / 2]);
    }
  }

 private:
  __device__ __forceinline__ void dx(int q, float2 scales, HalfStage& a) const {
    std::uint32_t& first = a[q / 2][q % 2 * 2];
    std::uint32_t& second = a[q / 2][q % 2 * 2 + 1];
    if constexpr (kBits == 8) {
      D::dx(packed_[q], scales, first, second);
    } else {
      D::dx(values_, packed_[q], selector_, scales, first, second);
    }
  }

  std::uint32_t row_;    ///< byte offset of the lane's row and chunk in a panel
  std::uint32_t entry_;  ///< and of its scales in a table
  std::uint32_t selector_;
  bool excess_;
  const std::byte* values_;  ///< nf4
  const std::byte* table_;
  std::uint32_t packed_[4];
  uint4 scales_;
};

}  // namespace moegemm::cuda::sm90
