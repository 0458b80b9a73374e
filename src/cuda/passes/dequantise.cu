#include <cuda_fp8.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "cuda/backend/launch/launch.h"
#include "cuda/device/weights/weight_decoders.cuh"
#include "cuda/passes/elements.cuh"
#include "cuda/passes/passes.h"

/// W = value * scale in fp32, rounded once. One warp per row of W. To bf16 and fp16 eight values at
/// a time by the decoders of the products, where rows of packed values and of the result allow it,
/// and several such loads in flight: that keeps up with memory. Else one value at a time.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kValues = 8;  // of a lane at a time
constexpr int kInFlight = 4;

__constant__ float nf4_values[16] = {
    kNf4Values[0],  kNf4Values[1],  kNf4Values[2],  kNf4Values[3], kNf4Values[4],  kNf4Values[5],
    kNf4Values[6],  kNf4Values[7],  kNf4Values[8],  kNf4Values[9], kNf4Values[10], kNf4Values[11],
    kNf4Values[12], kNf4Values[13], kNf4Values[14], kNf4Values[15]};

struct DequantiseArguments {
  const std::uint8_t* values;
  const void* scales;
  void* out;
  std::int64_t rows;  // of all experts, in the result
  std::int64_t rows_of_expert;
  std::int64_t columns;  // of the result
  std::int64_t first_row;
  std::int64_t first_column;
  std::int64_t k;
  std::int64_t expert_bytes;
  std::int64_t expert_scales;
  std::int64_t scale_columns;
  std::int64_t block_n;
  int block_k_shift;  // log2; 62 where one scale serves the row
  bool flat_blocks;   // nf4: blocks are of the matrix, not of its rows
  ScaleType scale_type;
  DType out_dtype;
};

__device__ __forceinline__ std::uint32_t load_scale_bits(const void* scales, ScaleType type,
                                                         std::int64_t i) {
  switch (type) {
    case ScaleType::kFloat32:
      return __ldg(static_cast<const std::uint32_t*>(scales) + i);
    case ScaleType::kBFloat16:
    case ScaleType::kFloat16:
      return __ldg(static_cast<const std::uint16_t*>(scales) + i);
    case ScaleType::kE8m0:
      break;
  }
  return __ldg(static_cast<const std::uint8_t*>(scales) + i);
}

/// The value of a nibble, or of a byte with fp8.
template <WeightFormat Format>
__device__ float value_of(unsigned bits) {
  if constexpr (Format == WeightFormat::kMxfp4) {
    // e2m1 is a float whose exponent is 126 more: s eee m with the bias moved by a product.
    const unsigned magnitude = bits & 7;
    const float value = __uint_as_float(magnitude << 22) * 0x1p126f;
    return (bits & 8) ? -value : value;
  } else if constexpr (Format == WeightFormat::kInt4) {
    return static_cast<float>(static_cast<int>(bits) - 8);
  } else if constexpr (Format == WeightFormat::kNf4) {
    return nf4_values[bits];
  } else {
    return __half2float(
        __half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(bits), __NV_E4M3)));
  }
}

template <WeightFormat Format>
__device__ float value_at(const std::uint8_t* values, std::int64_t i) {
  if constexpr (Format == WeightFormat::kFp8) return value_of<Format>(values[i]);
  const bool high = (i & 1) != (Format == WeightFormat::kNf4 ? 1 : 0);
  return value_of<Format>((values[i / 2] >> (high ? 4 : 0)) & 15u);
}

/// A row of W, and where its scales are.
struct PackedRow {
  const std::uint8_t* values;  // of its expert
  std::int64_t first_value;    // of the result's row
  std::int64_t first_place;    // of that, in the matrix or the row that blocks are of
  std::int64_t first_scale;

  __device__ __forceinline__ PackedRow(const DequantiseArguments& a, std::int64_t row) {
    const std::int64_t expert = row / a.rows_of_expert;
    const std::int64_t n = a.first_row + row % a.rows_of_expert;
    values = a.values + expert * a.expert_bytes;
    first_value = n * a.k + a.first_column;
    first_place = a.flat_blocks ? first_value : a.first_column;
    first_scale = expert * a.expert_scales + (a.flat_blocks ? 0 : n / a.block_n * a.scale_columns);
  }
  __device__ __forceinline__ std::uint32_t scale_bits(const DequantiseArguments& a,
                                                      std::int64_t column) const {
    return load_scale_bits(a.scales, a.scale_type,
                           first_scale + ((first_place + column) >> a.block_k_shift));
  }
};

template <typename Body>
__device__ __forceinline__ void for_each_row(const DequantiseArguments& a, const Body& body) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kWarps;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
       row < a.rows; row += step) {
    body(row, PackedRow(a, row));
  }
}

template <WeightFormat Format>
__global__ void __launch_bounds__(kThreads) dequantise_one_by_one(const DequantiseArguments a) {
  for_each_row(a, [&](std::int64_t row, const PackedRow& packed) {
    for (std::int64_t c = threadIdx.x % 32; c < a.columns; c += 32) {
      const float scale = scale_value(a.scale_type, packed.scale_bits(a, c));
      const float value = value_at<Format>(packed.values, packed.first_value + c);
      store_float(a.out, a.out_dtype, row * a.columns + c, value * scale);
    }
  });
}

/// Eight packed values.
template <WeightFormat Format>
using Word = std::conditional_t<Format == WeightFormat::kFp8, uint2, std::uint32_t>;

template <WeightFormat Format, typename Out>
__device__ __forceinline__ void decode_word(const Word<Format>& word, ScaleType type,
                                            std::uint32_t scale, std::uint32_t (&pairs)[4]) {
  if constexpr (Format == WeightFormat::kMxfp4) {
    Mxfp4Decoder<Out>(scale).decode(word, pairs);
  } else if constexpr (Format == WeightFormat::kNf4) {
    Nf4Decoder<Out>(__uint_as_float(scale)).decode(word, pairs);
  } else if constexpr (Format == WeightFormat::kInt4) {
    if (type == ScaleType::kBFloat16) {
      Int4Decoder<Out, __nv_bfloat16>(scale).decode(word, pairs);
    } else {
      Int4Decoder<Out, __half>(scale).decode(word, pairs);
    }
  } else {
    const Fp8Decoder<Out> decoder(scale_value(type, scale));
    std::uint32_t low[2], high[2];
    decoder.decode(word.x, low);
    decoder.decode(word.y, high);
    pairs[0] = low[0];
    pairs[1] = low[1];
    pairs[2] = high[0];
    pairs[3] = high[1];
  }
}

template <WeightFormat Format, typename Out>
__global__ void __launch_bounds__(kThreads) dequantise_words(const DequantiseArguments a) {
  constexpr int kStep = 32 * kValues;
  for_each_row(a, [&](std::int64_t row, const PackedRow& packed) {
    const auto* words = reinterpret_cast<const Word<Format>*>(packed.values) +
                        packed.first_value / kValues + threadIdx.x % 32;
    auto* out =
        reinterpret_cast<uint4*>(static_cast<Out*>(a.out) + row * a.columns) + threadIdx.x % 32;
    const std::int64_t lane = threadIdx.x % 32 * kValues;
    for (std::int64_t c = 0; c < a.columns; c += kInFlight * kStep) {
      Word<Format> word[kInFlight];
      std::uint32_t scale[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const std::int64_t column = c + i * kStep + lane;
        if (column >= a.columns) continue;
        word[i] = __ldcs(words + (c + i * kStep) / kValues);
        scale[i] = packed.scale_bits(a, column);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (c + i * kStep + lane >= a.columns) continue;
        std::uint32_t pairs[4];
        decode_word<Format, Out>(word[i], a.scale_type, scale[i], pairs);
        out[(c + i * kStep) / kValues] = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  });
}

template <WeightFormat Format>
const void* kernel_of(bool words, DType out) {
  if (!words) return reinterpret_cast<const void*>(&dequantise_one_by_one<Format>);
  return with_format(TensorCoreFormats(), out, [&]<DType D>() -> const void* {
    return reinterpret_cast<const void*>(&dequantise_words<Format, ElementType<D>>);
  });
}

const void* kernel_for(WeightFormat format, bool words, DType out) {
  switch (format) {
    case WeightFormat::kFp8:
      return kernel_of<WeightFormat::kFp8>(words, out);
    case WeightFormat::kInt4:
      return kernel_of<WeightFormat::kInt4>(words, out);
    case WeightFormat::kNf4:
      return kernel_of<WeightFormat::kNf4>(words, out);
    default:
      return kernel_of<WeightFormat::kMxfp4>(words, out);
  }
}

}  // namespace

void CudaPasses::dequantise(const TensorView& packed, const void* scales,
                            const Quantization& quantization, std::int64_t first_row,
                            std::int64_t first_column, const TensorView& out,
                            const ExecutionContext& context) const {
  const auto [experts, rows, columns] = out.shape;
  const std::int64_t n = packed.shape[1], k = packed.shape[2];
  if (experts == 0) return;
  const PassLaunch on(out.device, context);
  const bool whole_rows = quantization.format == WeightFormat::kFp8 && quantization.block_k == k;
  const std::int64_t word_bytes = kValues * quantization.bits() / 8;
  const auto is_aligned = [](const void* data, std::int64_t bytes) {
    return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0;
  };
  const bool words = size_bytes(out.dtype) == 2 && k % kValues == 0 && columns % kValues == 0 &&
                     first_column % kValues == 0 && is_aligned(packed.data, word_bytes) &&
                     is_aligned(out.data, 16);
  DequantiseArguments arguments = {
      .values = static_cast<const std::uint8_t*>(packed.data),
      .scales = scales,
      .out = out.data,
      .rows = experts * rows,
      .rows_of_expert = rows,
      .columns = columns,
      .first_row = first_row,
      .first_column = first_column,
      .k = k,
      .expert_bytes = quantization.expert_bytes(n, k),
      .expert_scales = quantization.expert_scales(n, k),
      .scale_columns = quantization.scale_columns(n, k),
      .block_n = quantization.block_n,
      .block_k_shift =
          whole_rows ? 62 : std::countr_zero(static_cast<std::uint64_t>(quantization.block_k)),
      .flat_blocks = quantization.format == WeightFormat::kNf4,
      .scale_type = quantization.scale_type,
      .out_dtype = out.dtype,
  };
  // As many blocks as run at the same time, several times over: rows are short.
  const std::int64_t most = 64 * device_facts(out.device.index)->multiprocessors;
  const std::int64_t blocks = std::min((arguments.rows + kWarps - 1) / kWarps, most);
  void* parameters[] = {&arguments};
  launch({kernel_for(quantization.format, words, out.dtype), "dequantise",
          dim3(static_cast<unsigned>(blocks)), dim3(kThreads)},
         parameters, on.stream);
}

}  // namespace moegemm::cuda
