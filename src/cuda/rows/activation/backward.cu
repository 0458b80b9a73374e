#include <algorithm>
#include <cstdint>

#include "cuda/device/activation_math.cuh"
#include "cuda/host/device_facts.h"
#include "cuda/host/error.h"
#include "cuda/host/launch.h"
#include "cuda/host/loading.h"
#include "cuda/rows/activation/activation.h"
#include "cuda/rows/activation/gate_packs.cuh"
#include "cuda/rows/activation/kernel_choice.h"
#include "cuda/rows/activation/limits.h"
#include "cuda/rows/activation/row_experts.cuh"
#include "cuda/rows/activation/thread_ring.cuh"
#include "cuda/rows/alignment.h"

/// The gradient of an activation, its weighted value and the gradient of the weight, in one pass. A
/// block has some consecutive rows; its warps take turns at their strips of 256 columns, so that
/// what is in flight is close together. Dot products are added in a fixed order: lanes in a tree,
/// then strips. What is not 16-byte aligned goes element by element, one warp per row. An element
/// is read before it is written, by the same thread: weighted_act may be d_act.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerMultiprocessor = 3;
/// Blocks come in at most this many waves, the last of them nearly full: a few blocks more than
/// whole waves would run alone at the end, for as long as all the others of a wave.
constexpr int kWaves = 6;
constexpr int kMostRows = 64;    // of a block
constexpr int kMostDots = 4096;  // of strips, in a block

struct RowMatrix {  // data null: not given
  void* data;
  DType dtype;
  std::int64_t stride;
};

struct BackwardArguments {
  RowMatrix pre;
  RowMatrix bias;  // of pre's dtype, as d_out and down_bias
  RowMatrix d_act;
  RowMatrix d_out;
  RowMatrix down_bias;
  RowMatrix d_pre;
  RowMatrix weighted_act;
  void* d_weights;  // [rows], flat order, or null
  DType d_weights_dtype;
  const void* weights;  // [rows], flat order, or null
  DType weights_dtype;
  const void* gather_indices;  // [rows] or null
  bool indices_64_bit;
  IndexArray m_sizes;
  int experts;
  int rows;
  int topk;
  int activated;
  int hidden;
  bool packed_hidden;  // d_out and down_bias by 16-byte accesses
  int group_rows;      // consecutive rows of a block
  int strips;          // in a row
  Activation activation;
  GateColumns columns;
};

/// What a block knows of one of its rows.
struct Row {
  int position;
  int flat;  // -1: zero in every output
  int expert;
  float weight;
};

/// The parts of a row that do not depend on m_sizes.
__device__ Row look_up(const BackwardArguments& a, int position) {
  Row row = {position, -1, 0, 1.0f};
  const std::int64_t flat =
      a.gather_indices ? load_index(a.gather_indices, a.indices_64_bit, position) : position;
  if (flat < 0 || flat >= a.rows) return row;
  row.flat = static_cast<int>(flat);
  if (a.weights) row.weight = load_float(a.weights, a.weights_dtype, flat);
  return row;
}

/// The rest of it.
__device__ void place(const BackwardArguments& a, const int* row_prefix, Row& row) {
  if (row.position >= row_prefix[a.experts]) {
    row.flat = -1;
  } else if (a.bias.data || a.down_bias.data) {
    row.expert = expert_of(row_prefix, a.experts, row.position);
  }
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullMask, value, distance);
  }
  return value;
}

/// This lane's part of <d_out[token], down_bias[expert]>.
template <typename T>
__device__ float bias_share(const BackwardArguments& a, const Row& row) {
  const std::int64_t d_out = row.flat / a.topk * a.d_out.stride;
  const std::int64_t bias = row.expert * a.down_bias.stride;
  const int packs = a.packed_hidden ? a.hidden / kPackElems : 0;
  float sum = 0.0f;
#pragma unroll 2
  for (int pack = threadIdx.x % 32; pack < packs; pack += 32) {
    float gradient[kPackElems], value[kPackElems];
    unpack(load_shared_pack(static_cast<const T*>(a.d_out.data) + d_out + pack * kPackElems),
           gradient);
    unpack(load_shared_pack(static_cast<const T*>(a.down_bias.data) + bias + pack * kPackElems),
           value);
#pragma unroll
    for (int i = 0; i < kPackElems; ++i) {
      sum = fmaf(gradient[i], value[i], sum);
    }
  }
  for (int c = packs * kPackElems + static_cast<int>(threadIdx.x % 32); c < a.hidden; c += 32) {
    sum = fmaf(load_float(a.d_out.data, a.d_out.dtype, d_out + c),
               load_float(a.down_bias.data, a.down_bias.dtype, bias + c), sum);
  }
  return sum;
}

/// The strips of a block's rows in order, of which a warp takes every eighth.
struct StripCursor {
  int row;
  int strip;

  __device__ __forceinline__ StripCursor(int warp, int strips)
      : row(warp / strips), strip(warp % strips) {}

  __device__ __forceinline__ void advance(int strips, int whole_rows, int rest) {
    row += whole_rows;
    strip += rest;
    if (strip >= strips) {
      strip -= strips;
      ++row;
    }
  }
};

template <typename T, GateLayout L>
using Ring = ThreadRing<T, GatePacks<T, L>::kPacks + 1, kThreads>;

/// Shared memory: the ring, the rows, their strips' dot products, the experts' prefix sums.
template <typename T, GateLayout L>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    backward_packs(const BackwardArguments a) {
  constexpr bool kGated = L != GateLayout::kNone;
  constexpr int kGradient = GatePacks<T, L>::kPacks;  // d_act's pack in the ring
  extern __shared__ uint4 memory[];
  auto* const rows = reinterpret_cast<Row*>(memory + Ring<T, L>::kBytes / sizeof(uint4));
  auto* const dots = reinterpret_cast<float*>(rows + a.group_rows);
  auto* const row_prefix = reinterpret_cast<int*>(dots + a.group_rows * a.strips);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = static_cast<int>(blockIdx.x) * a.group_rows;
  const int count = min(a.rows - first, a.group_rows);
  const int whole_rows = kWarps / a.strips, rest = kWarps % a.strips;

  Ring<T, L> ring(memory);
  StripCursor fetched(warp, a.strips);
  const auto fetch = [&] {
    if (fetched.row < count) {
      const int column = fetched.strip * kStripColumns + lane * kPackElems;
      const std::int64_t row = first + fetched.row;
      GatePacks<T, L>::load(ring, static_cast<const T*>(a.pre.data) + row * a.pre.stride, column,
                            a.activated);
      if (column < a.activated) {
        ring.load(kGradient, static_cast<const T*>(a.d_act.data) + row * a.d_act.stride + column);
      }
      fetched.advance(a.strips, whole_rows, rest);
    }
    ring.commit();
  };
  // Before m_sizes are known: rows past them hold memory, if nothing of meaning.
#pragma unroll
  for (int stage = 0; stage < Ring<T, L>::kStages; ++stage) {
    fetch();
  }
  Row mine;
  const bool has_row = static_cast<int>(threadIdx.x) < count;
  if (has_row) mine = look_up(a, first + static_cast<int>(threadIdx.x));
  share_row_prefix(a.m_sizes, a.experts, a.rows, row_prefix);
  if (has_row) {
    place(a, row_prefix, mine);
    rows[threadIdx.x] = mine;
  }
  __syncthreads();

  with_function(a.activation.function, [&]<ActivationFunction F>() {
    for (StripCursor at(warp, a.strips); at.row < count; at.advance(a.strips, whole_rows, rest)) {
      const Row row = rows[at.row];
      const int column = at.strip * kStripColumns + lane * kPackElems;
      float gate[kPackElems], up[kPackElems], gradient[kPackElems];
      ring.wait();
      GatePacks<T, L>::read(ring, gate, up);
      unpack(ring.read(kGradient), gradient);
      fetch();
      float sum = 0.0f;
      const bool is_column = column < a.activated;
      if (is_column && a.bias.data && row.flat >= 0) {
        GatePacks<T, L>::add_bias(static_cast<const T*>(a.bias.data) + row.expert * a.bias.stride,
                                  column, a.activated, gate, up);
      }
      if (is_column && row.flat >= 0) {
#pragma unroll
        for (int i = 0; i < kPackElems; ++i) {
          const Activated value = evaluate<F, kGated>(a.activation, gate[i], kGated ? up[i] : 0.0f);
          sum = fmaf(gradient[i], value.act, sum);
          const float weighted = row.weight * gradient[i];
          gate[i] = weighted * value.d_gate;
          if constexpr (kGated) up[i] = weighted * value.d_up;
          gradient[i] = row.weight * value.act;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kPackElems; ++i) {
          gate[i] = up[i] = gradient[i] = 0.0f;
        }
      }
      const std::int64_t position = row.position;
      GatePacks<T, L>::store(a.d_pre.data, a.d_pre.dtype == DType::kFloat32,
                             position * a.d_pre.stride, column, a.activated, gate, up);
      if (a.weighted_act.data && is_column) {
        store_pack_in<T>(a.weighted_act.data, a.weighted_act.dtype == DType::kFloat32,
                         position * a.weighted_act.stride + column, gradient);
      }
      if (a.d_weights) {
        sum = warp_sum(sum);
        if (lane == 0) dots[at.row * a.strips + at.strip] = sum;
      }
    }
  });
  if (!a.d_weights) return;
  __syncthreads();
  for (int r = warp; r < count; r += kWarps) {
    const Row row = rows[r];
    if (row.flat < 0) continue;
    const float share = a.down_bias.data ? warp_sum(bias_share<T>(a, row)) : 0.0f;
    if (lane > 0) continue;
    float sum = 0.0f;
    for (int strip = 0; strip < a.strips; ++strip) {
      sum += dots[r * a.strips + strip];
    }
    store_float(a.d_weights, a.d_weights_dtype, row.flat, sum + share);
  }
}

/// One element at a time; returns this lane's part of <d_act, act>.
template <ActivationFunction F>
__device__ float backward_row(const BackwardArguments& a, const Row& row) {
  const bool gated = a.activation.gated();
  const std::int64_t pre = row.position * a.pre.stride, d_pre = row.position * a.d_pre.stride;
  const auto biased = [&](int column) {
    const float value = load_float(a.pre.data, a.pre.dtype, pre + column);
    return a.bias.data
               ? value + load_float(a.bias.data, a.pre.dtype, row.expert * a.bias.stride + column)
               : value;
  };
  float sum = 0.0f;
  for (int c = threadIdx.x % 32; c < a.activated; c += 32) {
    const float gate = biased(a.columns.gate_at(c));
    const float up = gated ? biased(a.columns.up_at(c)) : 0.0f;
    const Activated value = gated ? evaluate<F, true>(a.activation, gate, up)
                                  : evaluate<F, false>(a.activation, gate, up);
    const float gradient =
        load_float(a.d_act.data, a.d_act.dtype, row.position * a.d_act.stride + c);
    sum = fmaf(gradient, value.act, sum);
    const float weighted = row.weight * gradient;
    store_float(a.d_pre.data, a.d_pre.dtype, d_pre + a.columns.gate_at(c), weighted * value.d_gate);
    if (gated) {
      store_float(a.d_pre.data, a.d_pre.dtype, d_pre + a.columns.up_at(c), weighted * value.d_up);
    }
    if (a.weighted_act.data) {
      store_float(a.weighted_act.data, a.weighted_act.dtype,
                  row.position * a.weighted_act.stride + c, row.weight * value.act);
    }
  }
  return sum;
}

__device__ void zero_columns(const RowMatrix& matrix, int row, int columns) {
  for (int c = threadIdx.x % 32; matrix.data && c < columns; c += 32) {
    store_float(matrix.data, matrix.dtype, row * matrix.stride + c, 0.0f);
  }
}

__global__ void __launch_bounds__(kThreads) backward_elements(const BackwardArguments a) {
  extern __shared__ int row_prefix[];
  share_row_prefix(a.m_sizes, a.experts, a.rows, row_prefix);
  const int step = static_cast<int>(gridDim.x) * kWarps;
  for (int r = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32); r < a.rows; r += step) {
    Row row = look_up(a, r);
    place(a, row_prefix, row);
    if (row.flat < 0) {
      zero_columns(a.d_pre, r, a.activation.gated() ? 2 * a.activated : a.activated);
      zero_columns(a.weighted_act, r, a.activated);
      continue;
    }
    float sum = 0.0f;
    with_function(a.activation.function,
                  [&]<ActivationFunction F>() { sum = backward_row<F>(a, row); });
    if (!a.d_weights) continue;
    if (a.down_bias.data) sum += bias_share<float>(a, row);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) store_float(a.d_weights, a.d_weights_dtype, row.flat, sum);
  }
}

struct PackedKernel {
  template <typename T, GateLayout L>
  const void* operator()() const {
    return reinterpret_cast<const void*>(&backward_packs<T, L>);
  }
};

const ListedKernels listed([] { return for_16_bit_layouts(PackedKernel()); });

RowMatrix matrix_of(const TensorView& view) {
  return {view.given() ? view.data : nullptr, view.dtype, view.row_stride};
}

bool aligned_if_given(const TensorView& view) { return !view.given() || is_16_byte_aligned(view); }

}  // namespace

void launch_activate_backward(const ActivationGradientInputs& in, const RoutingView& routing,
                              const Activation& activation, const ActivationGradientOutputs& out,
                              cudaStream_t stream) {
  const std::int64_t rows = in.pre.shape[0], activated = in.d_act.shape[1];
  if (rows == 0) {
    return;
  }
  const std::int64_t experts = routing.m_sizes.shape[0];
  const std::int64_t hidden = in.d_out.given() ? in.d_out.shape[1] : 0;
  const std::int64_t strips = (activated + kStripColumns - 1) / kStripColumns;
  const bool packed = activated % kPackElems == 0 && in.d_act.dtype == in.pre.dtype &&
                      is_16_byte_aligned(in.pre) && is_16_byte_aligned(in.d_act) &&
                      aligned_if_given(in.bias) && is_16_byte_aligned(out.d_pre) &&
                      aligned_if_given(out.weighted_act) && strips > 0 && strips <= kMostDots;
  const std::int64_t resident =
      kBlocksPerMultiprocessor * device_facts(in.pre.device.index)->multiprocessors;
  const std::int64_t blocks_at_most = resident * kWaves;
  const std::int64_t group =
      packed ? std::clamp<std::int64_t>((rows + blocks_at_most - 1) / blocks_at_most, 1,
                                        std::min<std::int64_t>(kMostRows, kMostDots / strips))
             : 1;
  const int shared_bytes =
      packed ? ring_bytes(activation.gated() ? 3 : 2, kThreads) +
                   static_cast<int>(group *
                                    static_cast<std::int64_t>(sizeof(Row) + strips * sizeof(float)))
             : 0;
  require_activation_limits(rows, std::max(in.pre.shape[1], hidden), experts, shared_bytes,
                            in.pre.device);
  BackwardArguments arguments = {
      .pre = matrix_of(in.pre),
      .bias = matrix_of(in.bias),
      .d_act = matrix_of(in.d_act),
      .d_out = matrix_of(in.d_out),
      .down_bias = matrix_of(in.down_bias),
      .d_pre = matrix_of(out.d_pre),
      .weighted_act = matrix_of(out.weighted_act),
      .d_weights = out.d_weights.given() ? out.d_weights.data : nullptr,
      .d_weights_dtype = out.d_weights.dtype,
      .weights = routing.topk_weights.given() ? routing.topk_weights.data : nullptr,
      .weights_dtype = routing.topk_weights.dtype,
      .gather_indices = routing.gather_indices.given() ? routing.gather_indices.data : nullptr,
      .indices_64_bit = routing.gather_indices.dtype == DType::kInt64,
      .m_sizes = {routing.m_sizes.data, routing.m_sizes.dtype == DType::kInt64},
      .experts = static_cast<int>(experts),
      .rows = static_cast<int>(rows),
      .topk = static_cast<int>(routing.topk),
      .activated = static_cast<int>(activated),
      .hidden = static_cast<int>(hidden),
      .packed_hidden = packed && aligned_if_given(in.d_out) && aligned_if_given(in.down_bias),
      .group_rows = static_cast<int>(group),
      .strips = static_cast<int>(strips),
      .activation = activation,
      .columns = gate_columns(activation, activated),
  };
  if (out.d_weights.given()) {
    // All zero bits are zero in every floating dtype.
    check(cudaMemsetAsync(out.d_weights.data, 0,
                          static_cast<std::size_t>(rows * size_bytes(out.d_weights.dtype)), stream),
          "clear d_weights for activate_backward");
  }
  void* parameters[] = {&arguments};
  if (!packed) {
    const std::int64_t blocks = std::min((rows + kWarps - 1) / kWarps, resident);
    launch({reinterpret_cast<const void*>(&backward_elements), "activate_backward (elements)",
            dim3(static_cast<unsigned>(blocks)), dim3(kThreads), row_prefix_bytes(experts)},
           parameters, stream);
    return;
  }
  launch({for_dtype_and_layout(in.pre.dtype, activation.layout, PackedKernel()),
          "activate_backward (packs)", dim3(static_cast<unsigned>((rows + group - 1) / group)),
          dim3(kThreads), shared_bytes + row_prefix_bytes(experts)},
         parameters, stream);
}

}  // namespace moegemm::cuda
