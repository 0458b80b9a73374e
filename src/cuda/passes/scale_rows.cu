#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/backend/device_facts.h"
#include "cuda/backend/error.h"
#include "cuda/backend/launch/launch.h"
#include "cuda/passes/alignment.h"
#include "cuda/passes/block_sums.cuh"
#include "cuda/passes/elements.cuh"
#include "cuda/passes/passes.h"
#include "moegemm/error.h"

/// One warp per row, or for several narrow ones: each lane walks its columns, multiplies, and the
/// lanes' dot products are added in a fixed tree. An element is read before it is written by the
/// same lane, so `scaled` may be `product`. Blocks stay for many rows, because each has to add up
/// m_sizes first.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kNarrowPacks = 16;  // of rows that a warp takes two or more of at a time

struct ScaleArguments {
  Floats product;
  Floats x;
  Floats scaled;
  Floats scaled_x;  // data null: not asked for
  const void* m_sizes;
  bool sizes_64_bit;
  std::int64_t experts;
  const void* gather_indices;
  bool indices_64_bit;
  const void* weights;  // [flat_rows]
  DType weights_dtype;
  void* dot;  // [flat_rows]
  DType dot_dtype;
  std::int64_t rows;
  std::int64_t flat_rows;  // indices are below it
  int columns;
  bool zero_tail;  // else rows past the segments are left alone
  int group_rows;  // consecutive rows that a warp takes at a time, at most 32
  bool narrow;     // columns are at most kNarrowPacks whole packs
};

/// Where the elements of one row begin.
struct RowOffsets {
  std::int64_t product, x, scaled, scaled_x;
};

__device__ RowOffsets offsets_of(const ScaleArguments& a, std::int64_t row) {
  return {row * a.product.stride, row * a.x.stride, row * a.scaled.stride, row * a.scaled_x.stride};
}

/// Columns [first, columns) one at a time; returns this lane's part of the dot product.
__device__ float scale_elements(const ScaleArguments& a, const RowOffsets& row, float weight,
                                int first) {
  float sum = 0.0f;
  for (int c = first + static_cast<int>(threadIdx.x % 32); c < a.columns; c += 32) {
    const float p = load_float(a.product.data, a.product.dtype, row.product + c);
    const float x = load_float(a.x.data, a.x.dtype, row.x + c);
    sum = fmaf(p, x, sum);
    store_float(a.scaled.data, a.scaled.dtype, row.scaled + c, weight * p);
    if (a.scaled_x.data) {
      store_float(a.scaled_x.data, a.scaled_x.dtype, row.scaled_x + c, weight * x);
    }
  }
  return sum;
}

/// The whole row by 16-byte accesses; columns past the last full pack one at a time.
template <typename P, typename X>
__device__ float scale_packs(const ScaleArguments& a, const RowOffsets& row, float weight) {
  constexpr int kInFlight = 2;  // packs of each operand: 64 to 128 bytes per lane
  const P* const product = static_cast<const P*>(a.product.data) + row.product;
  const X* const x = static_cast<const X*>(a.x.data) + row.x;
  const int packs = a.columns / kPackElems;
  float sum = 0.0f;
  for (int first = threadIdx.x % 32; first < packs; first += 32 * kInFlight) {
    Pack<P> product_packs[kInFlight];
    Pack<X> x_packs[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + 32 * j < packs) {
        product_packs[j] = load_pack(product + (first + 32 * j) * kPackElems);
        x_packs[j] = load_pack(x + (first + 32 * j) * kPackElems);
      }
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + 32 * j < packs) {
        float p[kPackElems], v[kPackElems];
        unpack(product_packs[j], p);
        unpack(x_packs[j], v);
#pragma unroll
        for (int i = 0; i < kPackElems; ++i) {
          sum = fmaf(p[i], v[i], sum);
          p[i] *= weight;
          v[i] *= weight;
        }
        const int column = (first + 32 * j) * kPackElems;
        store_pack(a.scaled.data, a.scaled.dtype, row.scaled + column, p);
        if (a.scaled_x.data) {
          store_pack(a.scaled_x.data, a.scaled_x.dtype, row.scaled_x + column, v);
        }
      }
    }
  }
  return sum + scale_elements(a, row, weight, packs * kPackElems);
}

/// What a warp knows of the rows that it takes: lane i of row i.
struct LaneRow {
  std::int64_t flat;
  float weight;
  bool named;
  bool zeroed;  // no index names it, or it is past the segments
};

/// Rows of at most kNarrowPacks packs, as many at a time as lanes are for. A row's lanes add as a
/// whole warp would that has nothing in the others: the dot products have the same bits.
template <typename P, typename X>
__device__ void scale_narrow(const ScaleArguments& a, std::int64_t first, int count,
                             const LaneRow& own) {
  const int lane = threadIdx.x % 32, packs = a.columns / kPackElems;
  int width = 1;
  while (width < packs) width *= 2;
  const int column = lane % width * kPackElems;
  for (int begin = 0; begin < count; begin += 32 / width) {
    const int i = begin + lane / width;  // below 32
    const bool named = __shfl_sync(kFullMask, own.named, i),
               zeroed = __shfl_sync(kFullMask, own.zeroed, i);
    const float weight = __shfl_sync(kFullMask, own.weight, i);
    const bool mine = i < count && column < a.columns && (named || zeroed);
    const RowOffsets row = offsets_of(a, first + i);
    float p[kPackElems] = {}, v[kPackElems] = {}, sum = 0.0f;
    if (mine && named) {
      unpack(load_pack(static_cast<const P*>(a.product.data) + row.product + column), p);
      unpack(load_pack(static_cast<const X*>(a.x.data) + row.x + column), v);
    }
#pragma unroll
    for (int c = 0; c < kPackElems; ++c) {
      sum = fmaf(p[c], v[c], sum);
      p[c] *= weight;
      v[c] *= weight;
    }
    if (mine) {
      store_pack(a.scaled.data, a.scaled.dtype, row.scaled + column, p);
      if (a.scaled_x.data) store_pack(a.scaled_x.data, a.scaled_x.dtype, row.scaled_x + column, v);
    }
    for (int step = width / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullMask, sum, step);
    const std::int64_t flat = __shfl_sync(kFullMask, own.flat, i);
    if (mine && named && column == 0) store_float(a.dot, a.dot_dtype, flat, sum);
  }
}

__device__ void zero_row(const ScaleArguments& a, const RowOffsets& row) {
  for (int c = threadIdx.x % 32; c < a.columns; c += 32) {
    store_float(a.scaled.data, a.scaled.dtype, row.scaled + c, 0.0f);
    if (a.scaled_x.data) {
      store_float(a.scaled_x.data, a.scaled_x.dtype, row.scaled_x + c, 0.0f);
    }
  }
}

/// Packs: 16-byte accesses, with P and X the dtypes of product and x; else one element at a time.
template <bool Packs, typename P, typename X>
__global__ void __launch_bounds__(kThreads, 3) scale_kernel(const ScaleArguments a) {
  const std::int64_t routed = block_routed_rows(a.m_sizes, a.sizes_64_bit, a.experts, a.rows);
  const int lane = threadIdx.x % 32;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kWarps * a.group_rows;
  for (std::int64_t first =
           (static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * a.group_rows;
       first < a.rows; first += step) {
    const int count = static_cast<int>(min(a.rows - first, std::int64_t{a.group_rows}));
    // Lane i fetches the index and the weight of row i: their latency is paid once for the group.
    std::int64_t lane_flat = -1;
    if (lane < count && first + lane < routed) {
      lane_flat = load_index(a.gather_indices, a.indices_64_bit, first + lane);
    }
    const bool lane_named = lane_flat >= 0 && lane_flat < a.flat_rows;
    const float lane_weight = lane_named ? load_float(a.weights, a.weights_dtype, lane_flat) : 0.0f;
    if constexpr (Packs) {
      if (a.narrow) {
        const bool zeroed = !lane_named && (a.zero_tail || first + lane < routed);
        scale_narrow<P, X>(a, first, count, {lane_flat, lane_weight, lane_named, zeroed});
        continue;
      }
    }
    const unsigned named = __ballot_sync(kFullMask, lane_named);
    for (int i = 0; i < count; ++i) {
      const RowOffsets row = offsets_of(a, first + i);
      if ((named >> i & 1) == 0) {
        if (a.zero_tail || first + i < routed) zero_row(a, row);
        continue;
      }
      const float weight = __shfl_sync(kFullMask, lane_weight, i);
      float sum;
      if constexpr (Packs) {
        sum = scale_packs<P, X>(a, row, weight);
      } else {
        sum = scale_elements(a, row, weight, 0);
      }
      sum = warp_sum(sum);
      if (lane == i) {
        store_float(a.dot, a.dot_dtype, lane_flat, sum);
      }
    }
  }
}

/// The packed kernel for product's and x's dtypes, or null where none is compiled: two different
/// 16-bit formats do not meet in one layer, nor does a 16-bit product of an fp32 x.
const void* packed_kernel(DType product, DType x) {
  return with_format(FloatingFormats(), x, [&]<DType D>() -> const void* {
    using X = ElementType<D>;
    if (product == D) return reinterpret_cast<const void*>(&scale_kernel<true, X, X>);
    if (product != DType::kFloat32) return nullptr;
    return reinterpret_cast<const void*>(&scale_kernel<true, float, X>);
  });
}

/// Columns are counted in 32 bits, with room for a step past the end.
constexpr std::int64_t kMaxColumns = std::int64_t{1} << 30;

}  // namespace

void CudaPasses::scale_rows(const TensorView& product, const TensorView& x,
                            const RoutingView& routing, const TensorView& scaled,
                            const TensorView& dot, const TensorView& scaled_x,
                            const ExecutionContext& context) const {
  const PassLaunch on(product.device, context);
  const std::int64_t rows = product.shape[0];
  if (rows == 0) {
    return;
  }
  if (product.shape[1] > kMaxColumns) {
    throw Error(ErrorKind::kNotImplemented, "scale_rows on a GPU takes at most 2^30 columns, got " +
                                                std::to_string(product.shape[1]));
  }
  ScaleArguments arguments = {
      .product = floats_of(product),
      .x = floats_of(x),
      .scaled = floats_of(scaled),
      .scaled_x = floats_of(scaled_x),
      .m_sizes = routing.m_sizes.data,
      .sizes_64_bit = routing.m_sizes.dtype == DType::kInt64,
      .experts = routing.m_sizes.shape[0],
      .gather_indices = routing.gather_indices.data,
      .indices_64_bit = routing.gather_indices.dtype == DType::kInt64,
      .weights = routing.router_weights.data,
      .weights_dtype = routing.router_weights.dtype,
      .dot = dot.data,
      .dot_dtype = dot.dtype,
      .rows = rows,
      .flat_rows = routing.router_weights.numel(),
      .columns = static_cast<int>(product.shape[1]),
      .zero_tail = routing.tails == Tails::kZero,
      .group_rows = 1,
      .narrow = false,
  };
  const bool aligned = is_16_byte_aligned(product) && is_16_byte_aligned(x) &&
                       is_16_byte_aligned(scaled) &&
                       (!scaled_x.given() || is_16_byte_aligned(scaled_x));
  const void* const packed = aligned ? packed_kernel(product.dtype, x.dtype) : nullptr;
  // 3 blocks of 256 threads are resident on a multiprocessor. Groups are as large as keeps all
  // their warps busy.
  const std::int64_t resident = 3 * device_facts(product.device.index)->multiprocessors;
  arguments.narrow = packed != nullptr && product.shape[1] % kPackElems == 0 &&
                     product.shape[1] <= kNarrowPacks * kPackElems;
  const std::int64_t most = arguments.narrow ? 32 : 8;
  const std::int64_t group = std::clamp<std::int64_t>(rows / (resident * kWarps), 1, most);
  arguments.group_rows = static_cast<int>(group);
  const std::int64_t groups = (rows + group - 1) / group;
  const std::int64_t blocks = std::min((groups + kWarps - 1) / kWarps, resident);
  // All zero bits are zero in every floating dtype.
  const std::int64_t dot_bytes = arguments.flat_rows * size_bytes(dot.dtype);
  cuda::check(cudaMemsetAsync(dot.data, 0, static_cast<std::size_t>(dot_bytes), on.stream),
              "clear dot for scale_rows");
  void* parameters[] = {&arguments};
  launch({packed ? packed : reinterpret_cast<const void*>(&scale_kernel<false, float, float>),
          packed ? "scale_rows (packs)" : "scale_rows (elements)",
          dim3(static_cast<unsigned>(blocks)), dim3(kThreads)},
         parameters, on.stream);
}

}  // namespace moegemm::cuda
