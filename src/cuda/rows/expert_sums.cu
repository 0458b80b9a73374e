#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/device/fast_divide.h"
#include "cuda/host/launch.h"
#include "cuda/host/loading.h"
#include "cuda/rows/alignment.h"
#include "cuda/rows/block_sums.cuh"
#include "cuda/rows/expert_sums.h"
#include "moegemm/error.h"

/// Sums of each expert's rows. A block takes one expert and a strip of columns: 32 threads side by
/// side, each with eight columns (or one, when the memory is not 16-byte aligned), eight deep in
/// rows. Thread (x, y) adds rows y, y + 8, ... in order and the eight partial sums are added in
/// order: the bits depend on the expert's rows alone.
namespace moegemm::cuda {
namespace {

constexpr int kWide = 32;
constexpr int kDeep = 8;
constexpr int kThreads = kWide * kDeep;
constexpr int kInFlight = 4;  // rows of a thread whose loads are in flight together

struct SumArguments {
  const void* rows;  // [M or T, columns]
  DType rows_dtype;
  std::int64_t rows_stride;
  const void* m_sizes;
  bool sizes_64_bit;
  const void* gather_indices;  // [M] or null
  bool indices_64_bit;
  const void* weights;  // [M], flat order, or null
  DType weights_dtype;
  void* sums;  // [experts, columns]
  DType sums_dtype;
  std::int64_t sums_stride;
  std::int64_t count;  // M
  FastDivisor topk;
  std::int64_t columns;
  unsigned strips;
};

/// The row of the input that position `r` reads, or -1, and what it counts.
__device__ std::int64_t source_of(const SumArguments& a, std::int64_t r, float& weight) {
  weight = 1.0f;
  if (!a.gather_indices) {
    return r;
  }
  const std::int64_t flat = load_index(a.gather_indices, a.indices_64_bit, r);
  if (flat < 0 || flat >= a.count) {
    return -1;
  }
  if (a.weights) {
    weight = load_float(a.weights, a.weights_dtype, flat);
  }
  return a.topk.divide(static_cast<std::uint32_t>(flat));
}

/// Columns: 8 by 16-byte accesses of elements T, or 1 of any dtype.
template <typename T, int Columns>
__global__ void __launch_bounds__(kThreads) sum_experts(const SumArguments a) {
  __shared__ float partial[kDeep][kWide * Columns];
  const std::int64_t expert = blockIdx.x / a.strips;
  const std::int64_t strip = static_cast<std::int64_t>(blockIdx.x % a.strips) * kWide * Columns;
  const std::int64_t begin = block_routed_rows(a.m_sizes, a.sizes_64_bit, expert, a.count);
  const std::int64_t end = block_routed_rows(a.m_sizes, a.sizes_64_bit, expert + 1, a.count);
  const int x = threadIdx.x % kWide, y = threadIdx.x / kWide;
  const std::int64_t column = strip + x * Columns;
  float sums[Columns] = {};
  if (column < a.columns) {
    for (std::int64_t first = begin + y; first < end; first += kDeep * kInFlight) {
      std::int64_t sources[kInFlight];
      float weights[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const std::int64_t r = first + kDeep * j;
        sources[j] = r < end ? source_of(a, r, weights[j]) : -1;
      }
      if constexpr (Columns == 1) {
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
          if (sources[j] >= 0) {
            const float value =
                load_float(a.rows, a.rows_dtype, sources[j] * a.rows_stride + column);
            sums[0] = fmaf(weights[j], value, sums[0]);
          }
        }
      } else {
        Pack<T> loaded[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
          if (sources[j] >= 0) {
            loaded[j] =
                load_pack(static_cast<const T*>(a.rows) + sources[j] * a.rows_stride + column);
          }
        }
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
          if (sources[j] >= 0) {
            float values[kPackElems];
            unpack(loaded[j], values);
#pragma unroll
            for (int i = 0; i < Columns; ++i) {
              sums[i] = fmaf(weights[j], values[i], sums[i]);
            }
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Columns; ++i) {
    partial[y][x * Columns + i] = sums[i];
  }
  __syncthreads();
  for (int c = threadIdx.x; c < kWide * Columns; c += kThreads) {
    if (strip + c < a.columns) {
      float sum = 0.0f;
#pragma unroll
      for (int deep = 0; deep < kDeep; ++deep) {
        sum += partial[deep][c];
      }
      store_float(a.sums, a.sums_dtype, expert * a.sums_stride + strip + c, sum);
    }
  }
}

const void* packed_kernel(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return reinterpret_cast<const void*>(&sum_experts<__half, kPackElems>);
    case DType::kBFloat16:
      return reinterpret_cast<const void*>(&sum_experts<__nv_bfloat16, kPackElems>);
    default:
      return reinterpret_cast<const void*>(&sum_experts<float, kPackElems>);
  }
}

const ListedKernels listed([] {
  return std::vector<const void*>{packed_kernel(DType::kBFloat16), packed_kernel(DType::kFloat16)};
});

}  // namespace

void launch_expert_sums(const TensorView& rows, const RoutingView& routing, const TensorView& sums,
                        cudaStream_t stream) {
  const std::int64_t experts = sums.shape[0], columns = sums.shape[1];
  if (columns == 0) {
    return;
  }
  const bool gathers = routing.gather_indices.given();
  const bool packed = columns % kPackElems == 0 && is_16_byte_aligned(rows);
  const std::int64_t strip = kWide * (packed ? kPackElems : 1);
  const std::int64_t strips = (columns + strip - 1) / strip;
  const std::int64_t count = gathers ? routing.gather_indices.shape[0] : rows.shape[0];
  if (strips > INT32_MAX / experts || count > INT32_MAX) {
    throw Error(ErrorKind::kNotImplemented, "expert_sums on a GPU: " + std::to_string(count) +
                                                " rows and " + std::to_string(experts * columns) +
                                                " sums, more than one launch covers");
  }
  SumArguments arguments = {
      .rows = rows.data,
      .rows_dtype = rows.dtype,
      .rows_stride = rows.row_stride,
      .m_sizes = routing.m_sizes.data,
      .sizes_64_bit = routing.m_sizes.dtype == DType::kInt64,
      .gather_indices = gathers ? routing.gather_indices.data : nullptr,
      .indices_64_bit = routing.gather_indices.dtype == DType::kInt64,
      .weights = routing.topk_weights.given() ? routing.topk_weights.data : nullptr,
      .weights_dtype = routing.topk_weights.dtype,
      .sums = sums.data,
      .sums_dtype = sums.dtype,
      .sums_stride = sums.row_stride,
      .count = count,
      .topk = make_fast_divisor(
          static_cast<std::uint32_t>(std::min<std::int64_t>(routing.topk, INT32_MAX))),
      .columns = columns,
      .strips = static_cast<unsigned>(strips),
  };
  void* parameters[] = {&arguments};
  launch(
      {packed ? packed_kernel(rows.dtype) : reinterpret_cast<const void*>(&sum_experts<float, 1>),
       packed ? "expert_sums (packs)" : "expert_sums (elements)",
       dim3(static_cast<unsigned>(experts * strips)), dim3(kThreads)},
      parameters, stream);
}

}  // namespace moegemm::cuda
