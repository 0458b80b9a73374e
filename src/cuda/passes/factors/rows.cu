#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/refusal.h"
#include "core/validation/tensor_rules.h"
#include "cuda/backend/launch/launch.h"
#include "cuda/backend/launch/segment_params.h"
#include "cuda/device/fast_divide.h"
#include "cuda/passes/early_start.cuh"
#include "cuda/passes/elements.cuh"
#include "cuda/passes/passes.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/griddepcontrol.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/ptx/shared_memory.cuh"

/// The thin product of few rows, from a factor as its owner keeps it: a block for each expert and
/// eight of its features, 16 rows at a time.
///
///   warp    role
///   0       rounds the factor as copy_factors would, multiplies and stores
///   1 to 4  copy chunks of the depth, three ahead; the factor's before they know which rows
///
/// A block meets once for each chunk: it has arrived, and the one before is no longer read. The
/// tensor cores add in steps of 16 along the depth, as all products do: the bits are those of the
/// product of a copied factor. (mma.sync and wgmma: 16384 sums of 4096 products on an H200, equal
/// to the last bit.) So the steps of a sum wait for each other, and nothing else may take as long.
namespace moegemm::cuda {
namespace {

constexpr int kCopying = 128;
constexpr int kThreads = kWarpSize + kCopying;
constexpr int kFeatures = 8;
constexpr int kRows = 16;
constexpr int kChunk = 256;  ///< of the depth
constexpr int kStages = 4;   ///< 68 KB: three blocks of a multiprocessor
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
  LaunchAhead ahead;
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

/// What the copying warps start of one chunk; what lies past the depth, the features or the rows is
/// zero.
template <typename Factor>
__device__ __forceinline__ void load_factor(const RowsArguments& a, const std::byte* factor,
                                            int first_feature, int depth, std::byte* stage) {
  constexpr int kSize = static_cast<int>(sizeof(Factor));
  constexpr int kPieces = kChunk * kSize / 16;  // of a feature
  const std::uint32_t base = ptx::shared_address(stage);
#pragma unroll
  for (int i = 0; i < kFeatures * kPieces / kCopying; ++i) {
    const int at = i * kCopying + static_cast<int>(threadIdx.x) - kWarpSize;
    const int feature = at / kPieces, piece = at % kPieces;
    const int element = depth + piece * (16 / kSize);
    const bool there = first_feature + feature < a.features && element < a.depth;
    const std::byte* source = there ? factor + feature * a.feature_pitch + element * kSize : factor;
    ptx::cp_async_16_or_zero(base + feature * kFactorPitch + piece * 16, source, there);
  }
}

__device__ __forceinline__ void load_rows(const RowsArguments& a, const std::byte* const* x_rows,
                                          int rows, int depth, std::byte* stage) {
  constexpr int kPieces = kChunk * 2 / 16;  // of a row
  const std::uint32_t base = ptx::shared_address(stage) + kFeatures * kFactorPitch;
  for (int at = static_cast<int>(threadIdx.x) - kWarpSize; at < rows * kPieces; at += kCopying) {
    const int row = at / kPieces, piece = at % kPieces;
    const int element = depth + piece * 8;
    const bool there = x_rows[row] != nullptr && element < a.depth;
    const std::byte* source = there ? x_rows[row] + element * 2 : a.x;
    ptx::cp_async_16_or_zero(base + row * kRowPitch + piece * 16, source, there);
  }
}

template <typename T>
__device__ __forceinline__ std::uint32_t rounded_pair(const std::byte* at, float, T) {
  const float2 pair = *reinterpret_cast<const float2*>(at);
  return round_pair(pair.x, pair.y, T());
}
template <typename T>
__device__ __forceinline__ std::uint32_t rounded_pair(const std::byte* at, T, T) {
  return *reinterpret_cast<const std::uint32_t*>(at);
}

/// One chunk of the depth, by one warp. Past the depth it adds zeros, which change no sum: none is
/// -0, since all begin at +0.
template <typename T, typename Factor>
__device__ __forceinline__ void multiply_chunk(const std::byte* stage, float (&d)[4]) {
  const int g = static_cast<int>(threadIdx.x) % kWarpSize / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  constexpr int kElement = static_cast<int>(sizeof(Factor));
  const std::byte* factor = stage + g * kFactorPitch + 2 * t * kElement;
  const std::byte* row = stage + kFeatures * kFactorPitch + g * kRowPitch + 4 * t;
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
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

template <typename T>
__device__ __forceinline__ void store_sums(const RowsArguments& a, int first_row, int rows,
                                           int first_feature, const float (&d)[4]) {
  const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (g + 8 * half >= rows) continue;
    std::byte* const target =
        a.out + (first_row + g + 8 * half) * a.out_pitch + (first_feature + 2 * t) * 2;
    *reinterpret_cast<std::uint32_t*>(target) = round_pair(d[2 * half], d[2 * half + 1], T());
  }
}

/// Where a row of X is, null for an index out of range.
__device__ __forceinline__ const std::byte* find_row(const RowsArguments& a, int row) {
  if (a.gather_indices.data) {
    const int flat = flat_row(a.gather_indices, row, a.flat_rows);
    if (flat < 0) return nullptr;
    row = static_cast<int>(a.divisor.divide(static_cast<unsigned>(flat)));
  }
  return a.x + row * a.x_pitch;
}

template <typename T, typename Factor>
__global__ void __launch_bounds__(kThreads, 3)
    factor_rows_kernel(const __grid_constant__ RowsArguments a) {
  extern __shared__ __align__(16) std::byte stages[];
  __shared__ int sums[kThreads / kWarpSize];
  __shared__ const std::byte* x_rows[kRows];
  const int expert = static_cast<int>(blockIdx.x) / a.groups;
  const int first_feature = static_cast<int>(blockIdx.x) % a.groups * kFeatures;
  if (a.ahead == LaunchAhead::kAny) ptx::griddepcontrol_wait();
  const int size = clip_size(a.sizes[expert], a.rows);
  if (size == 0) {
    ptx::griddepcontrol_wait();
    return;
  }
  const bool copies = threadIdx.x >= kWarpSize;
  const int chunks = ceil_div(a.depth, kChunk);
  const std::byte* const factor =
      a.factor + expert * a.expert_pitch + first_feature * a.feature_pitch;
  const auto stage_of = [&](int chunk) { return stages + chunk % kStages * kStageBytes; };
  const auto begin_factor = [&](int chunk) {
    if (copies && chunk < chunks) {
      load_factor<Factor>(a, factor, first_feature, chunk * kChunk, stage_of(chunk));
    }
  };
  for (int chunk = 0; chunk < kStages - 1; ++chunk) begin_factor(chunk);
  const int first = rows_before(a, expert, sums);
  if (a.ahead == LaunchAhead::kWritesRows) ptx::griddepcontrol_wait();
  const int count = min(size, a.rows - first);
  for (int from = 0; from < count; from += kRows) {
    const int rows = min(kRows, count - from);
    const auto begin_rows = [&](int chunk) {
      if (!copies) return;
      if (chunk < chunks) load_rows(a, x_rows, rows, chunk * kChunk, stage_of(chunk));
      ptx::cp_async_commit_group();
    };
    __syncthreads();  // nobody reads the rows and stages of the last round
    const int own = static_cast<int>(threadIdx.x);
    if (own < rows) x_rows[own] = find_row(a, first + from + own);
    __syncthreads();
    for (int chunk = 0; chunk < kStages - 1; ++chunk) {
      if (from > 0) begin_factor(chunk);
      begin_rows(chunk);
    }
    float d[4] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if (copies) ptx::cp_async_wait_group<kStages - 2>();
      __syncthreads();
      begin_factor(chunk + kStages - 1);
      begin_rows(chunk + kStages - 1);
      if (!copies) multiply_chunk<T, Factor>(stage_of(chunk), d);
    }
    if (from == 0) {
      if (a.ahead == LaunchAhead::kApart) ptx::griddepcontrol_wait();
      ptx::griddepcontrol_launch_dependents();
    }
    if (!copies) store_sums<T>(a, first + from, rows, first_feature, d);
  }
  ptx::griddepcontrol_wait();  // also where no row was left
  if (copies) {                // those of a factor that no row reads
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
  }
}

const void* kernel_for(DType dtype, DType factor) {
  return with_format(TensorCoreFormats(), dtype, [&]<DType D>() -> const void* {
    using T = ElementType<D>;
    if (factor == D) return reinterpret_cast<const void*>(&factor_rows_kernel<T, T>);
    return reinterpret_cast<const void*>(&factor_rows_kernel<T, float>);
  });
}

/// Why the kernel does not take a call; empty if it does.
std::string refuse(const TensorView& x, const StridedStack& factor, const RoutingView& routing,
                   const TensorView& rows) {
  if (size_bytes(x.dtype) != 2) return join("x is ", to_string(x.dtype), ", not bf16 or fp16");
  if (routing.segments() != Segments::kPacked) return "segments do not follow one another";
  const std::int64_t k = x.shape[1];
  constexpr std::int64_t kMost = std::int64_t{1} << 30;  // counted in 32 bits
  if (std::max({rows.shape[0], x.shape[0] * routing.topk, k}) > kMost) {
    return join("M = ", rows.shape[0], ", T * topk = ", x.shape[0] * routing.topk, " and K = ", k,
                " must be at most 2^30");
  }
  if (k % 8 != 0) return join("K = ", k, " is not a multiple of 8");
  const std::int64_t step = 16 / size_bytes(factor.dtype);
  const bool aligned = reinterpret_cast<std::uintptr_t>(factor.data) % 16 == 0 &&
                       factor.strides[0] % step == 0 && factor.strides[1] % step == 0;
  if (factor.strides[2] != 1 || !aligned || alignment_bytes(x) < 16 || alignment_bytes(rows) < 16) {
    return "rows are not aligned to 16 bytes with their columns side by side";
  }
  return {};
}

}  // namespace

void CudaPasses::factor_rows(const TensorView& x, const StridedStack& factor,
                             const RoutingView& routing, const TensorView& rows,
                             const ExecutionContext& context) const {
  if (const std::string reason = refuse(x, factor, routing, rows); !reason.empty()) {
    throw Error(ErrorKind::kNotImplemented, "factor_rows: " + reason);
  }
  if (rows.numel() == 0) return;
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
  arguments.ahead = context.ahead;
  const bool early = starts_early<__CUDA_ARCH_LIST__>(x.device, context);
  void* parameters[] = {&arguments};
  launch({kernel_for(x.dtype, factor.dtype), "factor_rows",
          dim3(static_cast<unsigned>(factor.shape[0] * arguments.groups)), dim3(kThreads),
          kStages * kStageBytes, early},
         parameters, on.stream);
}

}  // namespace moegemm::cuda
