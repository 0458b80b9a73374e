#include <cuda_fp8.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "cuda/backend/launch.h"
#include "cuda/passes/elements.cuh"
#include "cuda/passes/passes.h"

/// W = value * scale in fp32, rounded once. One warp per row of W, eight values at a time where
/// rows of packed values and of the result allow it, else one at a time.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kValues = 8;  // of a lane at a time

__constant__ float nf4_values[16] = {
    kNf4Values[0],  kNf4Values[1],  kNf4Values[2],  kNf4Values[3], kNf4Values[4],  kNf4Values[5],
    kNf4Values[6],  kNf4Values[7],  kNf4Values[8],  kNf4Values[9], kNf4Values[10], kNf4Values[11],
    kNf4Values[12], kNf4Values[13], kNf4Values[14], kNf4Values[15]};

struct DequantiseArguments {
  const std::uint8_t* values;
  const void* scales;
  void* out;
  std::int64_t rows;  // E * N
  std::int64_t n;
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

__device__ float load_scale(const void* scales, ScaleType type, std::int64_t i) {
  switch (type) {
    case ScaleType::kFloat32:
      return static_cast<const float*>(scales)[i];
    case ScaleType::kBFloat16:
      return to_float(static_cast<const __nv_bfloat16*>(scales)[i]);
    case ScaleType::kFloat16:
      return to_float(static_cast<const __half*>(scales)[i]);
    case ScaleType::kE8m0:
      break;
  }
  const unsigned bits = static_cast<const std::uint8_t*>(scales)[i];
  // 2^-127 is subnormal in fp32, and 255 is NaN.
  return __uint_as_float(bits == 0 ? 0x00400000u : bits == 255 ? 0x7fc00000u : bits << 23);
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

/// Value number i of the eight in `word`, which is 4 bytes of nibbles or 8 of fp8.
template <WeightFormat Format>
__device__ float value_in(std::uint64_t word, int i) {
  if constexpr (Format == WeightFormat::kFp8) {
    return value_of<Format>(static_cast<unsigned>(word >> (8 * i)) & 255u);
  } else {
    const int nibble = Format == WeightFormat::kNf4 ? i ^ 1 : i;  // nf4: the high half first
    return value_of<Format>(static_cast<unsigned>(word >> (4 * nibble)) & 15u);
  }
}

template <WeightFormat Format>
__device__ float value_at(const std::uint8_t* values, std::int64_t i) {
  if constexpr (Format == WeightFormat::kFp8) return value_of<Format>(values[i]);
  const bool high = (i & 1) != (Format == WeightFormat::kNf4 ? 1 : 0);
  return value_of<Format>((values[i / 2] >> (high ? 4 : 0)) & 15u);
}

template <WeightFormat Format, bool Packs, typename Out>
__global__ void __launch_bounds__(kThreads) dequantise_kernel(const DequantiseArguments a) {
  constexpr int kStep = Packs ? kValues : 1;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kWarps;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
       row < a.rows; row += step) {
    const std::int64_t expert = row / a.n, n = row % a.n;
    const std::uint8_t* const values = a.values + expert * a.expert_bytes;
    const std::int64_t first_scale =
        expert * a.expert_scales + (a.flat_blocks ? 0 : n / a.block_n * a.scale_columns);
    const std::int64_t first_place = a.flat_blocks ? n * a.k : 0;
    for (std::int64_t c = static_cast<std::int64_t>(threadIdx.x % 32) * kStep; c < a.k;
         c += 32 * kStep) {
      const std::int64_t scale_index = first_scale + ((first_place + c) >> a.block_k_shift);
      const float scale = load_scale(a.scales, a.scale_type, scale_index);
      const std::int64_t at = n * a.k + c;
      if constexpr (Packs) {
        std::uint64_t word;
        if constexpr (Format == WeightFormat::kFp8) {
          word = *reinterpret_cast<const std::uint64_t*>(values + at);
        } else {
          word = *reinterpret_cast<const std::uint32_t*>(values + at / 2);
        }
        float results[kValues];
#pragma unroll
        for (int i = 0; i < kValues; ++i) results[i] = value_in<Format>(word, i) * scale;
        store_pack_as(static_cast<Out*>(a.out) + row * a.k + c, results);
      } else {
        store_float(a.out, a.out_dtype, row * a.k + c, value_at<Format>(values, at) * scale);
      }
    }
  }
}

template <WeightFormat Format>
const void* kernel_of(bool packs, DType out) {
  if (!packs) return reinterpret_cast<const void*>(&dequantise_kernel<Format, false, float>);
  return with_format(FloatingFormats(), out, [&]<DType D>() -> const void* {
    return reinterpret_cast<const void*>(&dequantise_kernel<Format, true, ElementType<D>>);
  });
}

const void* kernel_for(WeightFormat format, bool packs, DType out) {
  switch (format) {
    case WeightFormat::kFp8:
      return kernel_of<WeightFormat::kFp8>(packs, out);
    case WeightFormat::kInt4:
      return kernel_of<WeightFormat::kInt4>(packs, out);
    case WeightFormat::kNf4:
      return kernel_of<WeightFormat::kNf4>(packs, out);
    default:
      return kernel_of<WeightFormat::kMxfp4>(packs, out);
  }
}

}  // namespace

void CudaPasses::dequantise(const TensorView& packed, const void* scales,
                            const Quantization& quantization, const TensorView& out,
                            const ExecutionContext& context) const {
  const auto [experts, n, k] = out.shape;
  if (experts == 0) return;
  const PassLaunch on(out.device, context);
  const bool whole_rows = quantization.format == WeightFormat::kFp8 && quantization.block_k == k;
  const std::int64_t word_bytes = kValues * quantization.bits() / 8;
  const auto is_aligned = [](const void* data, std::int64_t bytes) {
    return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0;
  };
  const bool packs =
      k % kValues == 0 && is_aligned(packed.data, word_bytes) && is_aligned(out.data, 16);
  DequantiseArguments arguments = {
      .values = static_cast<const std::uint8_t*>(packed.data),
      .scales = scales,
      .out = out.data,
      .rows = experts * n,
      .n = n,
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
  launch({kernel_for(quantization.format, packs, out.dtype), "dequantise",
          dim3(static_cast<unsigned>(blocks)), dim3(kThreads)},
         parameters, on.stream);
}

}  // namespace moegemm::cuda
