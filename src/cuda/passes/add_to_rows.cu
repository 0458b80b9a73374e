#include <algorithm>
#include <cstdint>

#include "cuda/backend/device_facts.h"
#include "cuda/backend/launch/launch.h"
#include "cuda/backend/launch/segment_params.h"
#include "cuda/passes/activation/limits.h"
#include "cuda/passes/activation/row_experts.cuh"
#include "cuda/passes/alignment.h"
#include "cuda/passes/passes.h"

/// out[r] = rows[r] + weight[r] * bias[expert of r], or rows[r] + added[r]: one warp per row, by
/// 16-byte accesses where memory is aligned for them. An element is read before it is written by
/// the same lane: `rows` may be `out`. Blocks stay for many rows, because each has to add up
/// m_sizes first.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerMultiprocessor = 4;

struct AddArguments {
  Floats rows;     // [count, columns]
  Floats added;    // [experts, columns] with weights, else [count, columns]
  Floats weights;  // [count], or null
  Floats out;      // [count, columns]
  SegmentParams segments;
  int columns;
};

/// The whole row; `columns` is a multiple of a pack.
template <typename In, typename Added, typename Out>
__device__ void add_packs(const AddArguments& a, std::int64_t row, std::int64_t addend,
                          float weight) {
  const In* const source = static_cast<const In*>(a.rows.data) + row * a.rows.stride;
  const Added* const added = static_cast<const Added*>(a.added.data) + addend * a.added.stride;
  Out* const target = static_cast<Out*>(a.out.data) + row * a.out.stride;
  for (int c = static_cast<int>(threadIdx.x % 32) * kPackElems; c < a.columns;
       c += 32 * kPackElems) {
    float values[kPackElems], terms[kPackElems];
    unpack(load_pack(source + c), values);
    unpack(load_shared_pack(added + c), terms);
#pragma unroll
    for (int i = 0; i < kPackElems; ++i) {
      values[i] = fmaf(weight, terms[i], values[i]);
    }
    store_pack_as(target + c, values);
  }
}

__device__ void add_elements(const AddArguments& a, std::int64_t row, std::int64_t addend,
                             float weight) {
  for (int c = static_cast<int>(threadIdx.x % 32); c < a.columns; c += 32) {
    const float term = a.added.load(addend * a.added.stride + c);
    a.out.store(row * a.out.stride + c, fmaf(weight, term, a.rows.load(row * a.rows.stride + c)));
  }
}

/// Packs: In, Added and Out are the dtypes of rows, added and out; else one element at a time, of
/// any dtype.
template <bool Packs, typename In, typename Added, typename Out>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    add_kernel(const AddArguments a) {
  extern __shared__ int row_prefix[];
  const int routed = share_positions(a.segments, row_prefix);
  const int step = static_cast<int>(gridDim.x) * kWarps;
  SegmentCursor at(a.segments, row_prefix);
  for (int position = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32); position < routed;
       position += step) {
    const int row = at.row_at(position);
    const int addend = a.weights.data ? at.expert() : row;
    const float weight = a.weights.data ? a.weights.load(row) : 1.0f;
    if constexpr (Packs) {
      add_packs<In, Added, Out>(a, row, addend, weight);
    } else {
      add_elements(a, row, addend, weight);
    }
  }
}

const void* kernel_for(bool packed, DType rows, DType added, DType out) {
  if (!packed) return reinterpret_cast<const void*>(&add_kernel<false, float, float, float>);
  return with_format(FloatingFormats(), out, [&]<DType D>() -> const void* {
    using Out = ElementType<D>;
    if (rows == D) return reinterpret_cast<const void*>(&add_kernel<true, Out, Out, Out>);
    if (added == D) return reinterpret_cast<const void*>(&add_kernel<true, float, Out, Out>);
    return reinterpret_cast<const void*>(&add_kernel<true, float, float, Out>);
  });
}

}  // namespace

void CudaPasses::add_to_rows(const TensorView& rows, const TensorView& added,
                             const RoutingView& routing, const TensorView& out,
                             const ExecutionContext& context) const {
  const PassLaunch on(out.device, context);
  const std::int64_t count = out.shape[0], columns = out.shape[1];
  if (count == 0 || columns == 0) {
    return;
  }
  const std::int64_t experts = routing.m_sizes.shape[0];
  require_activation_limits(count, columns, experts, 0, out.device);
  const bool packed = columns % kPackElems == 0 && is_16_byte_aligned(rows) &&
                      is_16_byte_aligned(added) && is_16_byte_aligned(out);
  AddArguments arguments = {
      .rows = floats_of(rows),
      .added = floats_of(added),
      .weights = floats_of(routing.router_weights),
      .out = floats_of(out),
      .segments = segment_params(routing, count, count),
      .columns = static_cast<int>(columns),
  };
  const std::int64_t resident =
      kBlocksPerMultiprocessor * device_facts(out.device.index)->multiprocessors;
  const std::int64_t blocks = std::min((count + kWarps - 1) / kWarps, resident);
  if (routing.tails == Tails::kZero) zero_gaps(out, routing, context);
  void* parameters[] = {&arguments};
  launch({kernel_for(packed, rows.dtype, added.dtype, out.dtype), "add_to_rows",
          dim3(static_cast<unsigned>(blocks)), dim3(kThreads), row_prefix_bytes(experts)},
         parameters, on.stream);
}

}  // namespace moegemm::cuda
