#pragma once

#include "cuda/device/quad_decoders.cuh"
#include "cuda/sm80/stream_gemm/params.h"

/// The scales of a stage: each lane loads those of its rows g and g + 8 of the tile (lane = 4 g +
/// t) and of a quarter of the depth, stages ahead. When the stage's turn comes it makes of them
/// what the decoder multiplies with, in a table in shared memory for all lanes of its warp.
namespace moegemm::cuda::sm80 {

/// Where they are in device memory.
struct ScaleRows {
  const std::byte* first;  ///< those of row g
  int second;              ///< bytes from there to those of row g + 8

  __device__ __forceinline__ void locate(const StreamGemmParams& params, int expert, int n,
                                         int last) {
    const WeightScales& scales = params.scales;
    const int row = min(n, last) >> scales.row_shift;
    first = scales.data + expert * scales.expert_bytes + row * scales.row_bytes;
    second = static_cast<int>(((min(n + 8, last) >> scales.row_shift) - row) * scales.row_bytes);
  }

  /// As it is stored, in the lowest bits. Past the last one: the last one.
  template <typename Stored>
  __device__ __forceinline__ std::uint32_t load(int h, int index, int count) const {
    const std::byte* at = first + (h == 0 ? 0 : second) + min(index, count - 1) * sizeof(Stored);
    return __ldg(reinterpret_cast<const Stored*>(at));
  }
};

/// mxfp4 and int4: a factor for each 32 of the depth, bf16 twice.
template <typename Quad, typename Stored, bool Clips>
class FactorScales {
 public:
  struct Loaded {
    std::uint32_t of[2][2];  ///< [row][group]: groups 2 t and 2 t + 1 of the stage
  };
  struct Factors {
    uint4 of[2];  ///< of each row, four groups
  };

  static __device__ __forceinline__ Loaded load(const StreamGemmParams& params,
                                                const ScaleRows& rows, int depth) {
    const int first = depth + lane_id() % 4 * 64;
    Loaded loaded;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = first + i % 2 * 32;
      loaded.of[i / 2][i % 2] = rows.template load<Stored>(
          i / 2, Clips ? k >> 5 : k >> params.scales.column_shift, params.scale_columns);
    }
    return loaded;
  }

  /// Whether some of them need a second product: `excess`.
  static __device__ __forceinline__ bool publish(const StreamGemmParams&, std::byte* table,
                                                 Loaded loaded) {
    std::byte* const own = table + offset(lane_id() % 4 / 2) + lane_id() % 2 * 8;
    bool excess = false;
    if constexpr (Clips) {
      const std::uint32_t all = loaded.of[0][0] | loaded.of[0][1] | loaded.of[1][0] |
                                loaded.of[1][1];
      excess = __any_sync(kFullMask, all >= Quad::kMost);
      if (excess) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          *reinterpret_cast<uint2*>(own + kExcess + h * kEightRows) = {
              Quad::excess_of(loaded.of[h][0]), Quad::excess_of(loaded.of[h][1])};
          loaded.of[h][0] = min(loaded.of[h][0], Quad::kMost);
          loaded.of[h][1] = min(loaded.of[h][1], Quad::kMost);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      *reinterpret_cast<uint2*>(own + h * kEightRows) = {Quad::factors_of(loaded.of[h][0]),
                                                         Quad::factors_of(loaded.of[h][1])};
    }
    return excess;
  }

  /// Of groups 4 `four` on.
  static __device__ __forceinline__ Factors read(const std::byte* table, int four) {
    const std::byte* own = table + offset(four);
    return {{*reinterpret_cast<const uint4*>(own),
             *reinterpret_cast<const uint4*>(own + kEightRows)}};
  }
  static __device__ __forceinline__ Factors read_excess(const std::byte* table, int four) {
    return read(table + kExcess, four);
  }
  /// Of one group of those.
  static __device__ __forceinline__ std::uint32_t pick(const uint4& four, int group) {
    return group % 2 == 0 ? (group % 4 == 0 ? four.x : four.z) : (group % 4 == 1 ? four.y : four.w);
  }

 private:
  static constexpr int kEightRows = 8 * 32;
  static constexpr int kExcess = 16 * 32;

  /// Of four factors of row g: rows of 32 bytes, whose halves alternate with the banks.
  static __device__ __forceinline__ int offset(int four) {
    const int g = lane_id() / 4;
    return g * 32 + (four ^ (g / 4 % 2)) * 16;
  }
};

/// nf4: the products of its table for each 64 of the depth.
class ProductScales {
 public:
  struct Loaded {
    std::uint32_t of[2];  ///< [row], of the stage's quarter t
  };

  static __device__ __forceinline__ Loaded load(const StreamGemmParams& params,
                                                const ScaleRows& rows, int depth) {
    const int index = (depth + lane_id() % 4 * 64) >> params.scales.column_shift;
    return {{rows.load<std::uint32_t>(0, index, params.scale_columns),
             rows.load<std::uint32_t>(1, index, params.scale_columns)}};
  }

  static __device__ __forceinline__ bool publish(const StreamGemmParams&, std::byte* table,
                                                 const Loaded& loaded) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Nf4Products products = Nf4Quad::products_of(__uint_as_float(loaded.of[h]));
      *at(table, h, lane_id() % 4, 0) = *reinterpret_cast<const uint4*>(products.low);
      *at(table, h, lane_id() % 4, 1) = *reinterpret_cast<const uint4*>(products.high);
    }
    return false;
  }

  /// Of row g + 8 h and that quarter.
  static __device__ __forceinline__ Nf4Products read(std::byte* table, int h, int quarter) {
    const uint4 low = *at(table, h, quarter, 0), high = *at(table, h, quarter, 1);
    return {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
  }

 private:
  static __device__ __forceinline__ uint4* at(std::byte* table, int h, int quarter, int half) {
    const int g = lane_id() / 4;
    return reinterpret_cast<uint4*>(table + (g + 8 * h) * 128 + ((2 * quarter + half) ^ g) * 16);
  }
};

/// fp8: blocks of 128 of the depth or more, so one for each row, which every lane of a quad loads.
class FloatScales {
 public:
  struct Loaded {
    std::uint32_t of[2];
  };

  static __device__ __forceinline__ Loaded load(const StreamGemmParams& params,
                                                const ScaleRows& rows, int depth) {
    const int index = depth >> params.scales.column_shift;
    const auto stored = [&](int h) {
      switch (params.scales.size_shift) {
        case 0:
          return rows.load<std::uint8_t>(h, index, params.scale_columns);
        case 1:
          return rows.load<std::uint16_t>(h, index, params.scale_columns);
        default:
          return rows.load<std::uint32_t>(h, index, params.scale_columns);
      }
    };
    return {{stored(0), stored(1)}};
  }

  static __device__ __forceinline__ float value(const StreamGemmParams& params,
                                                std::uint32_t stored) {
    return scale_value(params.scales.type, stored);
  }
};

template <WeightFormat F>
struct ScalesOf;
template <>
struct ScalesOf<WeightFormat::kMxfp4> {
  using Quad = Mxfp4Quad;
  using Type = FactorScales<Quad, std::uint8_t, true>;
};
template <>
struct ScalesOf<WeightFormat::kInt4> {
  using Quad = Int4Quad;
  using Type = FactorScales<Quad, std::uint16_t, false>;
};
template <>
struct ScalesOf<WeightFormat::kNf4> {
  using Quad = Nf4Quad;
  using Type = ProductScales;
};
template <>
struct ScalesOf<WeightFormat::kFp8> {
  using Quad = Fp8Quad;
  using Type = FloatScales;
};

}  // namespace moegemm::cuda::sm80
