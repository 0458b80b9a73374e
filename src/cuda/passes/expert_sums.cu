#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/backend/launch/launch.h"
#include "cuda/backend/launch/loading.h"
#include "cuda/backend/launch/segment_params.h"
#include "cuda/device/fast_divide.h"
#include "cuda/passes/alignment.h"
#include "cuda/passes/block_sums.cuh"
#include "cuda/passes/passes.h"
#include "cuda/passes/thread_ring.cuh"
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
/// Packs of a thread in flight: 24 KB for a block, of which seven or eight are on a multiprocessor.
/// The sums of gpt-oss's gradients took an H200 47 to 49 and 101 to 102 microseconds, gathered and
/// in order, with any of 4 to 8.
constexpr int kStages = 6;
/// Gathered rows that a block looks up together.
constexpr int kBatch = 512;
static_assert(kBatch % kDeep == 0);  // so that a thread has the same rows with batches and without

/// Pointers and widths as single members: with Floats and IndexArray in their place the compiler
/// reads them again in every turn of the loops, unrolls none, and takes 40 registers instead of 32.
struct SumArguments {
  const void* rows;  // [M or T, columns]
  DType rows_dtype;
  std::int64_t rows_stride;
  const void* m_sizes;
  bool sizes_64_bit;
  const void* starts;  // null: segments follow one another
  bool ends;
  const void* gather_indices;  // [M] or null
  bool indices_64_bit;
  const void* weights;  // [M], flat order, or null
  DType weights_dtype;
  void* sums;  // [experts, columns]
  DType sums_dtype;
  std::int64_t sums_stride;
  int count;  // M
  FastDivisor topk;
  std::int64_t columns;
  unsigned strips;
  std::int64_t flat_rows;  // indices are below it
};

/// A row that is added.
struct Source {
  int row;  // of the input; -1: none
  float weight;
};

__device__ __forceinline__ Source source_of(const SumArguments& a, int position) {
  if (!a.gather_indices) return {position, 1.0f};
  const std::int64_t flat = load_index(a.gather_indices, a.indices_64_bit, position);
  if (flat < 0 || flat >= a.flat_rows) return {-1, 0.0f};
  return {static_cast<int>(a.topk.divide(static_cast<std::uint32_t>(flat))),
          a.weights ? load_float(a.weights, a.weights_dtype, flat) : 1.0f};
}

/// What a block adds up: rows [begin, end) of an expert, columns from `first` on.
struct Share {
  std::int64_t expert;
  std::int64_t first;
  int begin;
  int end;
};

/// For blocks whose threads have `columns` each.
__device__ __forceinline__ Share share_of_block(const SumArguments& a, int columns) {
  const std::int64_t expert = blockIdx.x / a.strips;
  const std::int64_t size = load_index(a.m_sizes, a.sizes_64_bit, expert);
  if (a.starts) {
    const Placement placement = {{a.starts, a.sizes_64_bit}, a.ends, a.count};
    const int begin = placement.begin(static_cast<int>(expert));
    return {expert, static_cast<std::int64_t>(blockIdx.x % a.strips) * kWide * columns, begin,
            begin + placement.size(static_cast<int>(expert), size)};
  }
  const std::int64_t begin = block_routed_rows(a.m_sizes, a.sizes_64_bit, expert, a.count);
  const std::int64_t rows = min(max(size, std::int64_t{0}), a.count - begin);
  return {expert, static_cast<std::int64_t>(blockIdx.x % a.strips) * kWide * columns,
          static_cast<int>(begin), static_cast<int>(begin + rows)};
}

/// The end of a block: `partial` [kDeep][kWide * columns] in shared memory, which every thread has
/// filled.
__device__ __forceinline__ void store_sums(const SumArguments& a, const Share& share, int columns,
                                           const float* partial) {
  __syncthreads();
  const int width = kWide * columns;
  for (int c = static_cast<int>(threadIdx.x); c < width; c += kThreads) {
    if (share.first + c >= a.columns) break;
    float sum = 0.0f;
#pragma unroll
    for (int deep = 0; deep < kDeep; ++deep) {
      sum += partial[deep * width + c];
    }
    store_float(a.sums, a.sums_dtype, share.expert * a.sums_stride + share.first + c, sum);
  }
}

template <typename T>
using Ring = ThreadRing<T, 1, kThreads, kStages>;

/// By 16-byte accesses of elements T. Shared memory: the ring, and after it the partial sums in the
/// same place; the sources of a batch, if rows are gathered.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_packs(const SumArguments a) {
  extern __shared__ uint4 memory[];
  auto* const sources = reinterpret_cast<Source*>(memory + Ring<T>::kBytes / sizeof(uint4));
  const Share share = share_of_block(a, kPackElems);
  const int x = threadIdx.x % kWide, y = threadIdx.x / kWide;
  const bool has_columns = share.first + x * kPackElems < a.columns;
  const T* const base = static_cast<const T*>(a.rows) + share.first + x * kPackElems;
  Ring<T> ring(memory);
  float sums[kPackElems] = {};
  for (int first = share.begin; first < share.end;) {
    const int count = a.gather_indices ? min(share.end - first, kBatch) : share.end - share.begin;
    if (a.gather_indices) {
      if (first > share.begin) __syncthreads();  // the batch before has been read
      for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
        sources[i] = source_of(a, first + i);
      }
      __syncthreads();
    }
    const auto source = [&](int i) {
      return a.gather_indices ? sources[i] : Source{first + i, 1.0f};
    };
    int fetched = y;
    const auto fetch = [&] {
      if (has_columns && fetched < count) {
        const int row = source(fetched).row;
        if (row >= 0) ring.load(0, base + row * a.rows_stride);
      }
      ring.commit();
      fetched += kDeep;
    };
#pragma unroll
    for (int stage = 0; stage < Ring<T>::kStages; ++stage) fetch();
    for (int i = y; i < count; i += kDeep) {
      ring.wait();
      const Pack<T> pack = ring.read(0);
      fetch();
      const Source added = source(i);
      if (!has_columns || added.row < 0) continue;
      float values[kPackElems];
      unpack(pack, values);
#pragma unroll
      for (int c = 0; c < kPackElems; ++c) {
        sums[c] = fmaf(added.weight, values[c], sums[c]);
      }
    }
    first += count;
  }
  __syncthreads();  // nobody reads the ring any more
  auto* const partial = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int c = 0; c < kPackElems; ++c) {
    partial[(y * kWide + x) * kPackElems + c] = sums[c];
  }
  store_sums(a, share, kPackElems, partial);
}
static_assert(Ring<__half>::kBytes >= kThreads * kPackElems * static_cast<int>(sizeof(float)));

/// Element by element, of any dtype.
__global__ void __launch_bounds__(kThreads) sum_elements(const SumArguments a) {
  __shared__ float partial[kThreads];
  const Share share = share_of_block(a, 1);
  const std::int64_t column = share.first + threadIdx.x % kWide;
  float sum = 0.0f;
  if (column < a.columns) {
    for (int r = share.begin + static_cast<int>(threadIdx.x / kWide); r < share.end; r += kDeep) {
      const Source added = source_of(a, r);
      if (added.row < 0) continue;
      sum = fmaf(added.weight, load_float(a.rows, a.rows_dtype, added.row * a.rows_stride + column),
                 sum);
    }
  }
  partial[threadIdx.x] = sum;
  store_sums(a, share, 1, partial);
}

const void* packed_kernel(DType dtype) {
  return with_format(FloatingFormats(), dtype, [&]<DType D>() {
    return reinterpret_cast<const void*>(&sum_packs<ElementType<D>>);
  });
}

const ListedKernels listed([] {
  std::vector<const void*> kernels;
  for_each_format(TensorCoreFormats(), [&]<DType D>() { kernels.push_back(packed_kernel(D)); });
  return kernels;
});

}  // namespace

void CudaPasses::expert_sums(const TensorView& rows, const RoutingView& routing,
                             const TensorView& sums, const ExecutionContext& context) const {
  const PassLaunch on(rows.device, context);
  const std::int64_t experts = sums.shape[0], columns = sums.shape[1];
  if (columns == 0) {
    return;
  }
  const bool gathers = routing.gather_indices.given();
  const bool packed = columns % kPackElems == 0 && is_16_byte_aligned(rows);
  const std::int64_t strip = kWide * (packed ? kPackElems : 1);
  const std::int64_t strips = (columns + strip - 1) / strip;
  const std::int64_t count = gathers ? routing.gather_indices.shape[0] : rows.shape[0];
  constexpr std::int64_t kMostRows = INT32_MAX - kDeep * (kStages + 1);  // threads count past them
  const std::int64_t flat_rows = gathers ? rows.shape[0] * routing.topk : count;
  const std::int64_t most = std::max(count, flat_rows);
  if (strips > INT32_MAX / experts || most > kMostRows) {
    throw Error(ErrorKind::kNotImplemented, "expert_sums on a GPU: " + std::to_string(most) +
                                                " rows and " + std::to_string(experts * columns) +
                                                " sums, more than one launch covers");
  }
  SumArguments arguments = {
      .rows = rows.data,
      .rows_dtype = rows.dtype,
      .rows_stride = rows.row_stride,
      .m_sizes = routing.m_sizes.data,
      .sizes_64_bit = routing.m_sizes.dtype == DType::kInt64,
      .starts = placement_of(routing, count).starts.data,
      .ends = routing.ends,
      .gather_indices = gathers ? routing.gather_indices.data : nullptr,
      .indices_64_bit = routing.gather_indices.dtype == DType::kInt64,
      .weights = routing.router_weights.given() ? routing.router_weights.data : nullptr,
      .weights_dtype = routing.router_weights.dtype,
      .sums = sums.data,
      .sums_dtype = sums.dtype,
      .sums_stride = sums.row_stride,
      .count = static_cast<int>(count),
      .topk = make_fast_divisor(
          static_cast<std::uint32_t>(std::min<std::int64_t>(routing.topk, INT32_MAX))),
      .columns = columns,
      .strips = static_cast<unsigned>(strips),
      .flat_rows = flat_rows,
  };
  const int shared_bytes = packed ? ring_bytes(kStages, size_bytes(rows.dtype), 1, kThreads) +
                                        (gathers ? kBatch * static_cast<int>(sizeof(Source)) : 0)
                                  : 0;
  void* parameters[] = {&arguments};
  launch({packed ? packed_kernel(rows.dtype) : reinterpret_cast<const void*>(&sum_elements),
          packed ? "expert_sums (packs)" : "expert_sums (elements)",
          dim3(static_cast<unsigned>(experts * strips)), dim3(kThreads), shared_bytes},
         parameters, on.stream);
}

}  // namespace moegemm::cuda
