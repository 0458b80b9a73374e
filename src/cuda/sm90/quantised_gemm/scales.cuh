#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/quantised_gemm/decode.cuh"
#include "cuda/sm90/row_gemm/params.h"

/// Scales on their way from memory to the consumers. Producer warps write what a stage's weights
/// are multiplied by into a table that comes with the stage: consumers have no time for it.
///
/// | table   | forward, row r of 128           | dX, row n of 64, 32 columns c                   |
/// |---------|---------------------------------|-------------------------------------------------|
/// | factors | [r][half of 64] as 4 bytes      | [c][n / 32][n % 8 / 2][n % 32 / 8][n % 2]       |
/// | nf4     | [r] low bytes of its 16 values, | as others                                       |
/// |         | then [r] high bytes             |                                                 |
/// | excess  | [r][half], bf16                 | as the factors, bf16                            |
/// | flags   | of mxfp4: not zero says that the stage has excess factors                         |
/// Factors are bf16 (twice in forward) or fp32.
namespace moegemm::cuda::sm90 {

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
  /// mxfp4 and int4: those of k and k + 32 in one load, k being a multiple of 64; `same`: they are
  /// one. The launch makes sure of the address.
  template <WeightFormat F>
  __device__ __forceinline__ std::uint32_t load_both(int row, int k, bool same) const {
    if constexpr (F == WeightFormat::kMxfp4) {
      return __ldg(reinterpret_cast<const std::uint16_t*>(expert + row + (k >> 5)));
    } else if (same) {
      return load<F>(row, k);
    } else {
      return __ldg(reinterpret_cast<const std::uint32_t*>(expert) + (row + (k >> 5) >> 1));
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

/// Where the entries of a stage's table are.
template <typename Traits>
struct ScaleTable {
  static constexpr bool kForward = Traits::kDepthMajor;
  static constexpr int kEntry = kForward || !Decoder<Traits::kKernel.weights>::kBf16Scales ? 4 : 2;
  static constexpr int kExcess = Traits::kFactorBytes;
  static constexpr int kFlags = kExcess + kExcessBytes;

  /// Number of the entry of row n and 32 columns in dX.
  static __device__ __forceinline__ int dx_entry(int n, int chunk) {
    return chunk * 64 + n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2;
  }
};

/// Of one producer warp, for the stages that are its own: warps take turns. A thread has the scales
/// of 64 columns in four rows of W, for `Ahead` stages.
template <typename Traits, int Ahead>
class ScaleWriter {
  static constexpr WeightFormat kFormat = Traits::kKernel.weights;
  static constexpr bool kForward = Traits::kDepthMajor;
  static constexpr int kUnits = 128 / kWarpSize;
  /// Whether the scales of 64 columns are in one register.
  static constexpr bool kPacked = kFormat == WeightFormat::kMxfp4 || kFormat == WeightFormat::kInt4;
  using D = Decoder<kFormat>;
  using Table = ScaleTable<Traits>;
  static_assert(Traits::kFeatures == 128 && Traits::kStageDepth == kDepth);

 public:
  __device__ __forceinline__ void begin(const RowGemmParams& params, const Tile& tile) {
    const ScaleSource source(params.scales, tile.expert);
    expert_ = source.expert;
    if constexpr (kForward) {
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {  // rows past the last are not stored
        const int row = tile.feature + lane() + unit * kWarpSize;
        place_[unit] = source.row(min(row, params.features - 1));
      }
    } else {
      place_[0] = tile.feature;
    }
  }

  /// Requests the scales of stage `block`; `which` of Ahead sets of registers is free.
  __device__ __forceinline__ void fetch(const RowGemmParams& params, int block, int which) {
    ScaleSource source(params.scales, 0);
    source.expert = expert_;
    const bool same = same_scale(params);
    const int own = lane();
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int number = own + unit * kWarpSize;
      const int n = block * kDepth + number % 64;
      const int row = kForward ? place_[unit] : source.row(n);
      // Columns past the last are not stored either.
      const int k =
          kForward ? block * kDepth : min(place_[0] + unit / 2 * 64, params.features - 64);
      // Rows past the last are zeros in both operands: any finite scale will do.
      const bool exists = (kForward ? k : n) < params.depth;
      if constexpr (kPacked) {
        set(which, unit, 0, exists ? source.template load_both<kFormat>(row, k, same) : 0);
      } else {
        set(which, unit, 0, exists ? source.template load<kFormat>(row, k) : 0);
        if (same) continue;  // no copy, which would wait for it
        set(which, unit, 1, exists ? source.template load<kFormat>(row, k + 32) : 0);
      }
    }
  }

  /// Writes the table of a stage. Every lane arrives: racecheck does not follow one that does so
  /// for its warp, and it is no faster.
  __device__ __forceinline__ void write(const RowGemmParams& params, std::byte* table, int which,
                                        std::uint64_t* full) {
    const int own = lane();
    if constexpr (kFormat == WeightFormat::kMxfp4) {
      write_excess(table, which, own);
    }
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int number = own + unit * kWarpSize;
      if constexpr (kForward && kFormat == WeightFormat::kNf4) {
        D::write_products(table + number * 16, __uint_as_float(get(which, unit, 0)));
      } else {
        const auto first = decoder_scale<kFormat>(clipped(get(which, unit, 0)), params.scales.type);
        const int of_second = same_scale(params) ? 0 : 1;
        const auto second =
            decoder_scale<kFormat>(clipped(get(which, unit, of_second)), params.scales.type);
        store(table, number, bits(first), bits(second));
      }
    }
    ptx::mbarrier_arrive(full);
  }

 private:
  /// Whether 64 columns have one scale.
  static __device__ __forceinline__ bool same_scale(const RowGemmParams& params) {
    return kFormat != WeightFormat::kMxfp4 && params.scales.column_shift > 5;
  }
  /// Read anew: what follows from it must not wait in registers.
  static __device__ __forceinline__ int lane() { return ptx::thread_index() % kWarpSize; }
  static __device__ __forceinline__ std::uint32_t bits(std::uint32_t factor) { return factor; }
  static __device__ __forceinline__ std::uint32_t bits(float factor) {
    return __float_as_uint(factor);
  }
  static __device__ __forceinline__ std::uint32_t clipped(std::uint32_t loaded) {
    if constexpr (kFormat == WeightFormat::kMxfp4) return min(loaded, D::kMost);
    return loaded;
  }

  static __device__ __forceinline__ void store(std::byte* table, int number, std::uint32_t first,
                                               std::uint32_t second) {
    if constexpr (kForward) {
      reinterpret_cast<uint2*>(table)[number] = {first, second};
    } else {
      const int entry = Table::dx_entry(number % 64, number / 64 * 2);
      if constexpr (Table::kEntry == 2) {
        reinterpret_cast<std::uint16_t*>(table)[entry] = static_cast<std::uint16_t>(first);
        reinterpret_cast<std::uint16_t*>(table)[entry + 64] = static_cast<std::uint16_t>(second);
      } else {
        reinterpret_cast<std::uint32_t*>(table)[entry] = first;
        reinterpret_cast<std::uint32_t*>(table)[entry + 64] = second;
      }
    }
  }

  /// Scales that need two products are rare.
  __device__ __forceinline__ void write_excess(std::byte* table, int which, int own) {
    std::uint32_t most = 0;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      most = max(most, max(get(which, unit, 0), get(which, unit, 1)));
    }
    const bool any = __any_sync(kFullMask, most > D::kMost);
    if (own == 0) *reinterpret_cast<std::uint32_t*>(table + Table::kFlags) = any;
    if (!any) return;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int number = own + unit * kWarpSize;
      auto* excess = reinterpret_cast<std::uint16_t*>(table + Table::kExcess);
      const int entry = kForward ? number * 2 : Table::dx_entry(number % 64, number / 64 * 2);
      excess[entry] = static_cast<std::uint16_t>(D::excess(get(which, unit, 0)));
      excess[entry + (kForward ? 1 : 64)] =
          static_cast<std::uint16_t>(D::excess(get(which, unit, 1)));
    }
  }

  /// The set is known where a loop is unrolled; elsewhere it is looked for.
  __device__ __forceinline__ std::uint32_t get(int which, int unit, int half) const {
    std::uint32_t value = 0;
#pragma unroll
    for (int i = 0; i < Ahead; ++i) {
      const std::uint32_t* const both = loaded_[i][unit];
      if constexpr (kPacked) {
        constexpr int kBits = 8 * sizeof(typename D::Loaded);
        value = which == i ? both[0] >> half * kBits & (1u << kBits) - 1 : value;
      } else {
        value = which == i ? (half == 0 ? both[0] : both[1]) : value;
      }
    }
    return value;
  }
  __device__ __forceinline__ void set(int which, int unit, int place, std::uint32_t value) {
#pragma unroll
    for (int i = 0; i < Ahead; ++i) {
      if (which == i) loaded_[i][unit][place] = value;
    }
  }

  const std::byte* expert_;
  int place_[kForward ? kUnits : 1];  ///< the first scale of each row; dX: the tile's first column
  std::uint32_t loaded_[Ahead][kUnits][kPacked ? 1 : 2];
};

/// Rows in order: the tables of every stage, by warps that do nothing else; `warp` is the number of
/// one.
template <typename Traits>
__device__ __forceinline__ void write_scale_tables(const RowGemmParams& params,
                                                   const RowGemmShared<Traits>& shared, int warp) {
  constexpr int kWarps = Traits::kScaleWarps;
  constexpr int kAhead = 2;
  auto& rings = shared.rings();
  ScaleWriter<Traits, kAhead> writer;
  PipelineState<Traits::kStages> first;
  PipelineState<kTileSlots> slot;
  const int low_steps = ceil_div(params.low_rank, kDepth) * (kDepth / Traits::kLowDepth);
  const int blocks = ceil_div(params.depth, kDepth);
  while (true) {
    rings.tile.wait_full(slot);
    const Tile tile = shared.tiles()[slot.slot];
    if (tile.rows == 0) return;
    writer.begin(params, tile);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) writer.fetch(params, warp + i * kWarps, i);
    PipelineState<Traits::kStages> stage = first;
    stage.advance(warp);
#pragma unroll 1
    for (int block = warp; block < blocks; block += kAhead * kWarps) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int own = block + i * kWarps;
        if (own >= blocks) break;
        rings.stage.wait_empty(stage);
        writer.write(params, shared.scale_table(stage.slot), i, &rings.stage.full[stage.slot]);
        writer.fetch(params, own + kAhead * kWarps, i);
        stage.advance(kWarps);
      }
    }
    first.advance(blocks);
#pragma unroll 1
    for (int step = 0; step < low_steps; ++step) {  // their weights have no scales
      // Every warp waits: one that skipped a lap could take a parity two phases ahead for its own.
      rings.stage.wait_empty(first);
      if (warp == 0) ptx::mbarrier_arrive(&rings.stage.full[first.slot]);
      first.advance();
    }
    ptx::mbarrier_arrive(&rings.tile.empty[slot.slot]);
    slot.advance();
  }
}

}  // namespace moegemm::cuda::sm90
