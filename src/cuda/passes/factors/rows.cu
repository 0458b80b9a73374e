#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/factor_tiles.h"
#include "cuda/backend/launch.h"
#include "cuda/backend/segment_params.h"
#include "cuda/device/fast_divide.h"
#include "cuda/passes/elements.cuh"
#include "cuda/passes/passes.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/ptx/shared_memory.cuh"

/// The thin product of few rows, from a factor as its owner keeps it: a block for each expert and
/// eight of its features. All threads copy, five chunks of the depth ahead; one warp rounds the
/// factor as copy_factors would and multiplies, 16 rows at a time. The tensor cores add in steps of
/// 16 along the depth, as all products do: the bits are those of the product of a copied factor.
/// (mma.sync and wgmma: 16384 sums of 4096 products on an H200, equal to the last bit.)
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kFeatures = 8;
constexpr int kRows = 16;
constexpr int kChunk = 256;  ///< of the depth
constexpr int kStages = 5;
/// Rows of a stage in shared memory, padded so that fragments fall into different banks.
constexpr int kFactorPitch = kChunk * 4 + 32;
constexpr int kRowPitch = kChunk * 2 + 16;
constexpr int kStageBytes = kFeatures * kFactorPitch + kRows * kRowPitch;

struct RowsArguments {
  const std::byte* x;
  std::int64_t x_pitch;  ///< bytes
  const std::byte* factor;
  std::int64_t expert_pitch;   ///< bytes
  std::int64_t feature_pitch;  ///< bytes
  std::byte* out;
  std::int64_t out_pitch;  ///< bytes
  IndexArray sizes;
  IndexArray gather_indices;
  FastDivisor divisor;
  int rows;       ///< M
  int flat_rows;  ///< indices are below it
  int depth;
  int features;
  int groups;  ///< of eight features, zeros after the last one of the factor
};

/// Rows before an expert, at most `rows`; by all threads.
__device__ int rows_before(const RowsArguments& a, int expert, int* sums) {
  int before = 0;
  for (int e = static_cast<int>(threadIdx.x); e < expert; e += kThreads) {
    before = add_saturating(before, clip_size(a.sizes[e], a.rows), a.rows);
  }
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    before = add_saturating(before, __shfl_xor_sync(kFullMask, before, step), a.rows);
  }
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = before;
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarpSize; ++warp) {
    total = add_saturating(total, sums[warp], a.rows);
  }
  return total;
}

template <typename Factor>
struct Stage {
  static constexpr int kFactorChunks = kChunk * static_cast<int>(sizeof(Factor)) / 16;  // of a row
  static constexpr int kRowChunks = kChunk * 2 / 16;

  /// Starts the copies of one chunk; what lies past the depth, the features or the rows is zero.
  static __device__ void load(const RowsArguments& a, const std::byte* factor, int first_feature,
                              const std::byte* const* x_rows, int rows, int depth,
                              std::byte* stage) {
    const std::uint32_t base = ptx::shared_address(stage);
#pragma unroll
    for (int i = 0; i < kFeatures * kFactorChunks / kThreads; ++i) {
      const int piece = i * kThreads + static_cast<int>(threadIdx.x);
      const int feature = piece / kFactorChunks, chunk = piece % kFactorChunks;
      const int element = depth + chunk * (16 / static_cast<int>(sizeof(Factor)));
      const bool there = first_feature + feature < a.features && element < a.depth;
      const std::byte* source =
          there ? factor + feature * a.feature_pitch + element * sizeof(Factor) : factor;
      ptx::cp_async_16_or_zero(base + feature * kFactorPitch + chunk * 16, source, there);
    }
    const std::uint32_t rows_base = base + kFeatures * kFactorPitch;
    for (int piece = static_cast<int>(threadIdx.x); piece < rows * kRowChunks; piece += kThreads) {
      const int row = piece / kRowChunks, chunk = piece % kRowChunks;
      const int element = depth + chunk * 8;
      const bool there = x_rows[row] != nullptr && element < a.depth;
      const std::byte* source = there ? x_rows[row] + element * 2 : a.x;
      ptx::cp_async_16_or_zero(rows_base + row * kRowPitch + chunk * 16, source, there);
    }
  }
};

template <typename T>
__device__ __forceinline__ std::uint32_t rounded_pair(const std::byte* at, float, T) {
  const float2 pair = *reinterpret_cast<const float2*>(at);
  return round_pair(pair.x, pair.y, T());
}
template <typename T>
__device__ __forceinline__ std::uint32_t rounded_pair(const std::byte* at, T, T) {
  return *reinterpret_cast<const std::uint32_t*>(at);
}

/// One chunk of the depth, by one warp.
template <typename T, typename Factor>
__device__ __forceinline__ void multiply_chunk(const std::byte* stage, int steps, float (&d)[4]) {
  const int g = static_cast<int>(threadIdx.x) % kWarpSize / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  constexpr int kElement = static_cast<int>(sizeof(Factor));
  const std::byte* factor = stage + g * kFactorPitch + 2 * t * kElement;
  const std::byte* row = stage + kFeatures * kFactorPitch + g * kRowPitch + 4 * t;
#pragma unroll 4
  for (int step = 0; step < steps; ++step) {
    std::uint32_t a[4], b[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = *reinterpret_cast<const std::uint32_t*>(row + step * 32 + i % 2 * 8 * kRowPitch +
                                                     i / 2 * 16);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      b[i] = rounded_pair(factor + (step * 16 + i * 8) * kElement, Factor(), T());
    }
    ptx::mma_m16n8k16(d, a, b, T());
  }
}

template <typename T, typename Factor>
__global__ void __launch_bounds__(kThreads, 2)
    factor_rows_kernel(const __grid_constant__ RowsArguments a) {
  extern __shared__ __align__(16) std::byte stages[];
  __shared__ int sums[kThreads / kWarpSize];
  __shared__ const std::byte* x_rows[kRows];
  const int expert = static_cast<int>(blockIdx.x) / a.groups;
  const int first_feature = static_cast<int>(blockIdx.x) % a.groups * kFeatures;
  const int size = clip_size(a.sizes[expert], a.rows);
  if (size == 0) return;
  const int first = rows_before(a, expert, sums);
  const int count = min(size, a.rows - first);
  const std::byte* const factor =
      a.factor + expert * a.expert_pitch + first_feature * a.feature_pitch;
  const int chunks = ceil_div(a.depth, kChunk);
  for (int from = 0; from < count; from += kRows) {
    const int rows = min(kRows, count - from);
    __syncthreads();  // nobody reads the rows and stages of the last round
    if (threadIdx.x < kRows && static_cast<int>(threadIdx.x) < rows) {
      int source = first + from + static_cast<int>(threadIdx.x);
      if (a.gather_indices.data) {
        const int flat = flat_row(a.gather_indices, source, a.flat_rows);
        source = flat < 0 ? -1 : static_cast<int>(a.divisor.divide(static_cast<unsigned>(flat)));
      }
      x_rows[threadIdx.x] = source < 0 ? nullptr : a.x + source * a.x_pitch;
    }
    __syncthreads();
    const auto load = [&](int chunk) {
      if (chunk < chunks) {
        Stage<Factor>::load(a, factor, first_feature, x_rows, rows, chunk * kChunk,
                            stages + chunk % kStages * kStageBytes);
      }
      ptx::cp_async_commit_group();
    };
    for (int chunk = 0; chunk < kStages - 1; ++chunk) load(chunk);
    float d[4] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      load(chunk + kStages - 1);
      ptx::cp_async_wait_group<kStages - 1>();
      __syncthreads();
      if (threadIdx.x < kWarpSize) {
        const int left = min(kChunk, a.depth - chunk * kChunk);
        multiply_chunk<T, Factor>(stages + chunk % kStages * kStageBytes, ceil_div(left, 16), d);
      }
      __syncthreads();
    }
    if (threadIdx.x < kWarpSize) {
      const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (g + 8 * half >= rows) continue;
        *reinterpret_cast<std::uint32_t*>(a.out + (first + from + g + 8 * half) * a.out_pitch +
                                          (first_feature + 2 * t) * 2) =
            round_pair(d[2 * half], d[2 * half + 1], T());
      }
    }
  }
}

const void* kernel_for(DType dtype, DType factor) {
  return with_format(TensorCoreFormats(), dtype, [&]<DType D>() -> const void* {
    using T = ElementType<D>;
    if (factor == D) return reinterpret_cast<const void*>(&factor_rows_kernel<T, T>);
    return reinterpret_cast<const void*>(&factor_rows_kernel<T, float>);
  });
}

}  // namespace
}  // namespace moegemm::cuda

namespace moegemm {

void factor_rows_on_gpu(const TensorView& x, const StridedStack& factor, const RoutingView& routing,
                        const TensorView& rows, const ExecutionContext& context) {
  using namespace cuda;
  const PassLaunch on(x.device, context);
  const std::int64_t bytes = size_bytes(factor.dtype);
  RowsArguments arguments = {};
  arguments.x = static_cast<const std::byte*>(x.data);
  arguments.x_pitch = x.row_stride * 2;
  arguments.factor = static_cast<const std::byte*>(factor.data);
  arguments.expert_pitch = factor.strides[0] * bytes;
  arguments.feature_pitch = factor.strides[1] * bytes;
  arguments.out = static_cast<std::byte*>(rows.data);
  arguments.out_pitch = rows.row_stride * 2;
  arguments.sizes = indices_of(routing.m_sizes);
  arguments.gather_indices = indices_of(routing.gather_indices);
  arguments.divisor = make_fast_divisor(static_cast<std::uint32_t>(routing.topk));
  arguments.rows = static_cast<int>(rows.shape[0]);
  arguments.flat_rows = static_cast<int>(x.shape[0] * routing.topk);
  arguments.depth = static_cast<int>(x.shape[1]);
  arguments.features = static_cast<int>(factor.shape[1]);
  arguments.groups = static_cast<int>(rows.shape[1] / kFeatures);
  void* parameters[] = {&arguments};
  launch({kernel_for(x.dtype, factor.dtype), "factor_rows",
          dim3(static_cast<unsigned>(factor.shape[0] * arguments.groups)), dim3(kThreads),
          kStages * kStageBytes},
         parameters, on.stream);
}

}  // namespace moegemm
