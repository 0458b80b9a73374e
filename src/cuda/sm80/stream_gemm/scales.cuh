#pragma once

#include <climits>

#include "cuda/device/weights/quad_decoders.cuh"
#include "cuda/sm80/stream_gemm/params.h"

/// Scales in device memory. Lane 4 g + t loads those of its rows g and g + 8 of a tile, two stages
/// before they are needed.
namespace moegemm::cuda::sm80 {

template <WeightFormat F>
struct LoadedScales;

/// Eight bytes of each row, one for each 32 of the depth, at any address: the three words that they
/// are in, and where they begin there.
template <>
struct LoadedScales<WeightFormat::kMxfp4> {
  std::uint32_t words[2][3];
  std::uint32_t shift[2];  ///< bits
};
/// Eight, four or two bf16 of each row, for groups of 32, 64 or 128.
template <>
struct LoadedScales<WeightFormat::kInt4> {
  std::uint32_t words[2][4];
};
/// One of each row: nf4 for the stage's quarter t, fp8 for all of it.
template <>
struct LoadedScales<WeightFormat::kNf4> {
  std::uint32_t of[2];
};
template <>
struct LoadedScales<WeightFormat::kFp8> {
  std::uint32_t of[2];
};

template <WeightFormat F>
class ScaleStream {
  using Loaded = LoadedScales<F>;

 public:
  static constexpr bool kBlocks = F == WeightFormat::kMxfp4 || F == WeightFormat::kInt4;

  /// The scales of row n of an expert and of row n + 8; rows past `last` have those of it.
  __device__ __forceinline__ void locate(const StreamGemmParams& params, int expert, int n,
                                         int last) {
    const WeightScales& scales = params.scales;
    const auto at = reinterpret_cast<std::uintptr_t>(scales.data + expert * scales.expert_bytes);
    const auto inside = static_cast<int>(at % 4);
    words_ = reinterpret_cast<const std::uint32_t*>(at - inside);
    const auto row_bytes = static_cast<int>(scales.row_bytes);
    rows_[0] = inside + (min(n, last) >> scales.row_shift) * row_bytes;
    rows_[1] = inside + (min(n + 8, last) >> scales.row_shift) * row_bytes;
  }

  /// Those of the stage at `depth`, or of it and the three after it.
  __device__ __forceinline__ void load(const StreamGemmParams& params, int depth,
                                       Loaded& loaded) const {
    const int t = lane_id() % 4;
    if constexpr (F == WeightFormat::kMxfp4) {
      // Words after the last scale are not there. Which ones are loaded instead does not matter.
      const std::int64_t left = params.scales.end - reinterpret_cast<const std::byte*>(words_) - 1;
      const int last = static_cast<int>(left / 4 < INT_MAX ? left / 4 : INT_MAX);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int byte = rows_[h] + depth / 32 + t * 8;
        loaded.shift[h] = byte % 4 * 8;
#pragma unroll
        for (int i = 0; i < 3; ++i) loaded.words[h][i] = __ldg(words_ + min(byte / 4 + i, last));
      }
    } else if constexpr (F == WeightFormat::kInt4) {
      const int shift = params.scales.column_shift;
      const int first = (depth + t * 256) >> (shift + 1), last = params.scale_columns / 2 - 1;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::uint32_t* row = words_ + rows_[h] / 4;
        loaded.words[h][0] = __ldg(row + min(first, last));
        if (shift <= 6) loaded.words[h][1] = __ldg(row + min(first + 1, last));
        if (shift <= 5) {
          loaded.words[h][2] = __ldg(row + min(first + 2, last));
          loaded.words[h][3] = __ldg(row + min(first + 3, last));
        }
      }
    } else if constexpr (F == WeightFormat::kNf4) {
      const int index =
          min((depth + t * 64) >> params.scales.column_shift, params.scale_columns - 1);
#pragma unroll
      for (int h = 0; h < 2; ++h) loaded.of[h] = __ldg(words_ + rows_[h] / 4 + index);
    } else {  // blocks of 128 or more: a stage is in one
      const int size_shift = params.scales.size_shift;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::byte* at = reinterpret_cast<const std::byte*>(words_) + rows_[h] +
                              (depth >> params.scales.column_shift << size_shift);
        loaded.of[h] = size_shift == 2   ? __ldg(reinterpret_cast<const std::uint32_t*>(at))
                       : size_shift == 1 ? __ldg(reinterpret_cast<const std::uint16_t*>(at))
                                         : __ldg(reinterpret_cast<const std::uint8_t*>(at));
      }
    }
  }

 private:
  const std::uint32_t* words_;  ///< the word that the expert's begin in
  int rows_[2];                 ///< bytes from there
};

}  // namespace moegemm::cuda::sm80
