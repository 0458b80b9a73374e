#pragma once

#include "cuda/ptx/mma_sync.cuh"
#include "cuda/ptx/packed_memory.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/sm80/stream_gemm/scales.cuh"

/// From a stage in shared memory to mma.sync's fragments of W. A step is two groups of 16 of the
/// depth; scales are made for the decoder once by a warp, in a table of its own where all lanes of
/// a quad need them.
///
/// Each decoder has
///   prime(scales)         with those of the first stage
///   begin(stage, scales)  at the start of each stage of a tile, when all lanes have left the one
///                         before: with the scales of the stage after it, or, where they come for
///                         several stages, of this and the next ones
///   load(stage, step)     a step's packed weights
///   read_scales(pair)     what steps 2 pair and 2 pair + 1 are multiplied with
///   decode<Rare>(...)     fragments; Rare: of a stage for which rare() says so
namespace moegemm::cuda::sm80 {

/// mma.sync's fragments of W: [group of the step][register].
using StepWeights = std::uint32_t[2][4];

template <typename Traits>
class StageDecoder;

/// Four bits: 16 bytes of a row are a step, which all lanes of a quad load.
struct PackedNibbles {
  uint4 rows[2];  ///< g, g + 8

  static __device__ __forceinline__ PackedNibbles load(std::uint32_t stage, int step) {
    const int g = lane_id() / 4;
    const std::uint32_t own = (stage + g * (kStreamRowBytes + 16)) ^ (step * 16);
    return {{ptx::ld_shared_16(own), ptx::ld_shared_16(own + 8 * kStreamRowBytes)}};
  }
};

/// The same where a lane loads nothing but its own four weights of each group.
struct OwnNibbles {
  std::uint32_t rows[2][2];  ///< [group][g, g + 8]

  static __device__ __forceinline__ OwnNibbles load(std::uint32_t stage, int step) {
    const int g = lane_id() / 4;
    const std::uint32_t own =
        ((stage + g * (kStreamRowBytes + 16)) ^ (step * 16)) + lane_id() % 4 * 2;
    constexpr int kEightRows = 8 * kStreamRowBytes;
    return {{{ptx::ld_shared_2(own), ptx::ld_shared_2(own + kEightRows)},
             {ptx::ld_shared_2(own + 8), ptx::ld_shared_2(own + 8 + kEightRows)}}};
  }
};

/// mxfp4 and int4: the table has a bf16 factor, twice, for each row and 32 of the depth of four
/// stages: rows of 128 bytes, whose eight chunks alternate with the banks.
template <typename Traits>
requires(Traits::kFormat == WeightFormat::kMxfp4 ||
         Traits::kFormat == WeightFormat::kInt4) class StageDecoder<Traits> {
  using Quad = std::conditional_t<Traits::kFormat == WeightFormat::kMxfp4, Mxfp4Quad, Int4Quad>;
  using Scales = LoadedScales<Traits::kFormat>;
  static constexpr bool kClips = Traits::kFormat == WeightFormat::kMxfp4;
  static constexpr int kRowBytes = 32 * kBlockStages;
  static constexpr int kEightRows = 8 * kRowBytes;

 public:
  static constexpr QuadOrder kOrder = Quad::kOrder;
  using Packed = PackedNibbles;

  __device__ __forceinline__ explicit StageDecoder(std::byte* table)
      : table_(ptx::shared_address(table) + lane_id() / 4 * (kRowBytes + 16)),
        selector_(Quad::selector_of(lane_id() % 4)) {}

  static __device__ __forceinline__ void prime(const StreamGemmParams&, const Scales&) {}
  __device__ __forceinline__ void begin(const StreamGemmParams& params, int stage,
                                        const Scales& scales) {
    if (stage % kBlockStages == 0) {
      publish(params, scales);
      __syncwarp();
    }
    stage_ = table_ ^ (stage % kBlockStages * 32);
  }
  __device__ __forceinline__ bool rare() const { return rare_; }

  static __device__ __forceinline__ Packed load(std::uint32_t stage, int step) {
    return Packed::load(stage, step);
  }
  struct PairScales {
    uint2 rows[2];
  };
  __device__ __forceinline__ PairScales read_scales(int pair) const {
    const std::uint32_t own = (stage_ ^ (pair / 2 * 16)) + pair % 2 * 8;
    return {{ptx::ld_shared_8(own), ptx::ld_shared_8(own + kEightRows)}};
  }
  template <bool Rare>
  __device__ __forceinline__ void decode(const Packed& packed, const PairScales& scales, int step,
                                         StepWeights& a) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4& row = packed.rows[h];
      std::uint32_t factors = step % 2 == 0 ? scales.rows[h].x : scales.rows[h].y, more = 0;
      if constexpr (Rare && kClips) {  // the table has the scales themselves
        more = Quad::excess_of(factors);
        factors = Quad::factors_of(min(factors, Quad::kMost));
      }
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        std::uint32_t pairs[2];
        Quad::decode(group == 0 ? row.x : row.z, group == 0 ? row.y : row.w, selector_, factors,
                     pairs);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (Rare && kClips) pairs[i] = multiply_pairs(pairs[i], more, __nv_bfloat16{});
          a[group][2 * i + h] = pairs[i];
        }
      }
    }
  }

 private:
  /// Four factors of the lane's stage, of row g + 8 h.
  __device__ __forceinline__ void store(int h, int four, const std::uint32_t (&made)[4]) const {
    const std::uint32_t own = table_ ^ (lane_id() % 4 * 32 + four * 16);
    ptx::st_shared_16(own + h * kEightRows, {made[0], made[1], made[2], made[3]});
  }

  __device__ __forceinline__ void publish(const StreamGemmParams& params, const Scales& scales) {
    if constexpr (kClips) {
      std::uint32_t bytes[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bytes[i / 2][i % 2] = __funnelshift_r(scales.words[i / 2][i % 2],
                                              scales.words[i / 2][i % 2 + 1], scales.shift[i / 2]);
      }
      // Scales that need two products, and 128: then the table has them as they are.
      const std::uint32_t all = bytes[0][0] | bytes[0][1] | bytes[1][0] | bytes[1][1];
      rare_ = __any_sync(kFullMask, (all & 0x80808080u) != 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        std::uint32_t made[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const std::uint32_t e8m0 = permute_bytes(bytes[i / 2][i % 2], 0, 0x4440 + j);
          made[j] = rare_ ? e8m0 : Quad::factors_of(e8m0);
        }
        store(i / 2, i % 2, made);
      }
    } else {
      const int shift = params.scales.column_shift;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t(&words)[4] = scales.words[i / 2];
        const std::uint32_t shared_by_two = shift == 6 ? words[i % 2] : words[0];
        const std::uint32_t low = shift <= 5 ? words[i % 2 * 2] : shared_by_two;
        const std::uint32_t high = shift <= 5 ? words[i % 2 * 2 + 1] : low;
        // Which half of them: groups of 32 one after the other, of 64 twice, of 128 four times.
        const auto half = [&](std::uint32_t word, bool second) {
          return permute_bytes(word, 0, second ? 0x3232 : 0x1010);
        };
        const bool odd = shift >= 7 && i % 2 == 1;
        const std::uint32_t made[4] = {half(low, odd), half(low, shift <= 5 || odd),
                                       half(high, shift == 6 || odd),
                                       half(high, shift <= 6 || odd)};
        store(i / 2, i % 2, made);
      }
    }
  }

  const std::uint32_t table_;  ///< the lane's row g
  std::uint32_t stage_ = 0;    ///< the same for the first chunk of this stage
  const std::uint32_t selector_;
  bool rare_ = false;
};

/// nf4: the table has the 16 products for each row and 64 of the depth: rows of 128 bytes, low
/// and high bytes of a quarter in two chunks, which alternate with the banks.
template <typename Traits>
requires(Traits::kFormat == WeightFormat::kNf4) class StageDecoder<Traits> {
  using Scales = LoadedScales<WeightFormat::kNf4>;

 public:
  static constexpr QuadOrder kOrder = Nf4Quad::kOrder;
  using Packed = OwnNibbles;

  __device__ __forceinline__ explicit StageDecoder(std::byte* table)
      : table_(ptx::shared_address(table) + lane_id() / 4 * (128 + 16)) {}

  __device__ __forceinline__ void prime(const StreamGemmParams&, const Scales& scales) {
    next_ = scales;
  }
  __device__ __forceinline__ void begin(const StreamGemmParams&, int, const Scales& scales) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Nf4Products made = Nf4Quad::products_of(__uint_as_float(next_.of[h]));
      const std::uint32_t own = (table_ + h * 1024) ^ (lane_id() % 4 * 32);
      ptx::st_shared_16(own, {made.low.first, made.low.second, made.low.third, made.low.fourth});
      ptx::st_shared_16(own ^ 16,
                        {made.high.first, made.high.second, made.high.third, made.high.fourth});
    }
    next_ = scales;
    __syncwarp();
  }
  static __device__ __forceinline__ bool rare() { return false; }

  static __device__ __forceinline__ Packed load(std::uint32_t stage, int step) {
    return Packed::load(stage, step);
  }
  struct PairScales {
    uint4 low[2], high[2];  ///< of each row
  };
  __device__ __forceinline__ PairScales read_scales(int pair) const {
    const std::uint32_t own = table_ ^ (pair * 32);
    return {{ptx::ld_shared_16(own), ptx::ld_shared_16(own + 1024)},
            {ptx::ld_shared_16(own ^ 16), ptx::ld_shared_16((own ^ 16) + 1024)}};
  }
  template <bool Rare>
  __device__ __forceinline__ void decode(const Packed& packed, const PairScales& scales, int,
                                         StepWeights& a) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 &low = scales.low[h], &high = scales.high[h];
      const Nf4Products products = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        std::uint32_t pairs[2];
        Nf4Quad::decode(packed.rows[group][h], products, pairs);
        a[group][h] = pairs[0];
        a[group][2 + h] = pairs[1];
      }
    }
  }

 private:
  const std::uint32_t table_;
  Scales next_;  ///< of the stage that begins next
};

/// fp8: 16 bytes of a row are a group of 16, of which ldmatrix gives each lane its four. A scale
/// serves a stage.
template <typename Traits>
requires(Traits::kFormat == WeightFormat::kFp8) class StageDecoder<Traits> {
  using Scales = LoadedScales<WeightFormat::kFp8>;

 public:
  static constexpr QuadOrder kOrder = Fp8Quad::kOrder;
  struct Packed {
    std::uint32_t words[2][2];  ///< [group][row]
  };

  __device__ __forceinline__ explicit StageDecoder(std::byte*) {}

  __device__ __forceinline__ void prime(const StreamGemmParams& params, const Scales& scales) {
    next_[0] = scale_value(params.scales.type, scales.of[0]);
    next_[1] = scale_value(params.scales.type, scales.of[1]);
  }
  __device__ __forceinline__ void begin(const StreamGemmParams& params, int, const Scales& scales) {
    scales_[0] = next_[0];
    scales_[1] = next_[1];
    prime(params, scales);
  }
  static __device__ __forceinline__ bool rare() { return false; }

  static __device__ __forceinline__ Packed load(std::uint32_t stage, int step) {
    // Matrices: rows 0 to 7 and 8 to 15 of a chunk, then of the next.
    const int row = lane_id() % 16;
    const std::uint32_t own = stage + row * kStreamRowBytes + (lane_id() / 16 ^ row % 8) * 16;
    Packed packed;
    ptx::ldmatrix_x4(own ^ (step * 32), packed.words[0][0], packed.words[0][1], packed.words[1][0],
                     packed.words[1][1]);
    return packed;
  }
  struct PairScales {};
  static __device__ __forceinline__ PairScales read_scales(int) { return {}; }
  template <bool Rare>
  __device__ __forceinline__ void decode(const Packed& packed, PairScales, int,
                                         StepWeights& a) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint32_t pairs[2];
      Fp8Quad::decode(packed.words[i / 2][i % 2], scales_[i % 2], pairs);
      a[i / 2][i % 2] = pairs[0];
      a[i / 2][2 + i % 2] = pairs[1];
    }
  }

 private:
  float scales_[2];  ///< of rows g, g + 8
  float next_[2];
};

}  // namespace moegemm::cuda::sm80
