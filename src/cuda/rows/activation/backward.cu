#include <algorithm>
#include <cstdint>

#include "cuda/host/device_facts.h"
#include "cuda/host/error.h"
#include "cuda/host/launch.h"
#include "cuda/rows/activation/activation.h"
#include "cuda/rows/activation/limits.h"
#include "cuda/rows/activation/math.cuh"
#include "cuda/rows/activation/row_experts.cuh"
#include "cuda/rows/alignment.h"

/// The gradient of an activation, its weighted value and the gradient of the weight, in one pass.
/// One warp per row, as in scale_rows.cu: each lane walks its columns and the lanes' dot products
/// are added in a fixed tree. An element is read before it is written by the same lane, so
/// weighted_act may be d_act.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerMultiprocessor = 2;  // 128 registers a thread: three derivatives of a pack

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
  int group_rows;      // consecutive rows that a warp takes at a time, at most 32
  Activation activation;
  GateColumns columns;
};

/// What a warp knows of the row it works on.
struct Row {
  int position;
  int flat;
  int expert;
  float weight;
};

/// One element at a time; returns this lane's part of <d_act, act>.
__device__ float backward_elements(const BackwardArguments& a, const Row& row) {
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
    Activated value;
    with_function(a.activation.function, [&]<ActivationFunction F>() {
      value = gated ? evaluate<F, true>(a.activation, gate, up)
                    : evaluate<F, false>(a.activation, gate, up);
    });
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

/// By 16-byte accesses, with d_act in pre's dtype T.
template <typename T, GateLayout L>
__device__ float backward_packs(const BackwardArguments& a, const Row& row) {
  constexpr bool kGated = L != GateLayout::kNone;
  constexpr int kInFlight = sizeof(T) == 2 ? 2 : 1;  // packs of each operand: 96 bytes per lane
  const T* const pre = static_cast<const T*>(a.pre.data) + row.position * a.pre.stride;
  const T* const d_act = static_cast<const T*>(a.d_act.data) + row.position * a.d_act.stride;
  const T* const bias =
      a.bias.data ? static_cast<const T*>(a.bias.data) + row.expert * a.bias.stride : nullptr;
  const std::int64_t d_pre = row.position * a.d_pre.stride;
  const int packs = a.activated / kPackElems;
  float sum = 0.0f;
  for (int first = threadIdx.x % 32; first < packs; first += 32 * kInFlight) {
    GatePacks<T, L> pre_packs[kInFlight];
    Pack<T> gradient_packs[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + 32 * j < packs) {
        const int column = (first + 32 * j) * kPackElems;
        pre_packs[j] = GatePacks<T, L>::load(pre, column, a.activated);
        gradient_packs[j] = load_pack(d_act + column);
      }
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + 32 * j < packs) {
        const int column = (first + 32 * j) * kPackElems;
        float gate[kPackElems], up[kPackElems], gradient[kPackElems];
        pre_packs[j].split(gate, up);
        unpack(gradient_packs[j], gradient);
        if (bias) {
          float gate_bias[kPackElems], up_bias[kPackElems];
          GatePacks<T, L>::load(bias, column, a.activated).split(gate_bias, up_bias);
#pragma unroll
          for (int i = 0; i < kPackElems; ++i) {
            gate[i] += gate_bias[i];
            if constexpr (kGated) up[i] += up_bias[i];
          }
        }
        with_function(a.activation.function, [&]<ActivationFunction F>() {
#pragma unroll
          for (int i = 0; i < kPackElems; ++i) {
            const Activated value =
                evaluate<F, kGated>(a.activation, gate[i], kGated ? up[i] : 0.0f);
            sum = fmaf(gradient[i], value.act, sum);
            const float weighted = row.weight * gradient[i];
            gate[i] = weighted * value.d_gate;
            if constexpr (kGated) up[i] = weighted * value.d_up;
            gradient[i] = row.weight * value.act;
          }
        });
        store_gate_packs<L>(a.d_pre.data, a.d_pre.dtype, d_pre, column, a.activated, gate, up);
        if (a.weighted_act.data) {
          store_pack(a.weighted_act.data, a.weighted_act.dtype,
                     row.position * a.weighted_act.stride + column, gradient);
        }
      }
    }
  }
  return sum;
}

/// This lane's part of <d_out[token], down_bias[expert]>.
template <typename T>
__device__ float bias_share(const BackwardArguments& a, const Row& row) {
  const std::int64_t d_out = row.flat / a.topk * a.d_out.stride;
  const std::int64_t bias = row.expert * a.down_bias.stride;
  const int packs = a.packed_hidden ? a.hidden / kPackElems : 0;
  float sum = 0.0f;
  for (int pack = threadIdx.x % 32; pack < packs; pack += 32) {
    float gradient[kPackElems], value[kPackElems];
    unpack(load_pack(static_cast<const T*>(a.d_out.data) + d_out + pack * kPackElems), gradient);
    unpack(load_pack(static_cast<const T*>(a.down_bias.data) + bias + pack * kPackElems), value);
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

__device__ void zero_columns(const RowMatrix& matrix, int row, int columns) {
  for (int c = threadIdx.x % 32; matrix.data && c < columns; c += 32) {
    store_float(matrix.data, matrix.dtype, row * matrix.stride + c, 0.0f);
  }
}

/// Packs: 16-byte accesses; else one element at a time.
template <bool Packs, typename T, GateLayout L>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    backward_kernel(const BackwardArguments a) {
  extern __shared__ int row_prefix[];
  share_row_prefix(a.m_sizes, a.experts, a.rows, row_prefix);
  const int routed = row_prefix[a.experts];
  const int lane = threadIdx.x % 32;
  const int step = static_cast<int>(gridDim.x) * kWarps * a.group_rows;
  for (int first = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32) * a.group_rows;
       first < a.rows; first += step) {
    const int count = min(a.rows - first, a.group_rows);
    // Lane i finds out about row i: the latencies are paid once for the group.
    Row mine = {first + lane, -1, 0, 1.0f};
    if (lane < count && mine.position < routed) {
      const std::int64_t flat = a.gather_indices
                                    ? load_index(a.gather_indices, a.indices_64_bit, mine.position)
                                    : mine.position;
      if (flat >= 0 && flat < a.rows) {
        mine.flat = static_cast<int>(flat);
        if (a.weights) mine.weight = load_float(a.weights, a.weights_dtype, flat);
        if (a.bias.data || a.down_bias.data) {
          mine.expert = expert_of(row_prefix, a.experts, mine.position);
        }
      }
    }
    for (int i = 0; i < count; ++i) {
      const Row row = {first + i, __shfl_sync(kFullMask, mine.flat, i),
                       __shfl_sync(kFullMask, mine.expert, i),
                       __shfl_sync(kFullMask, mine.weight, i)};
      if (row.flat < 0) {
        zero_columns(a.d_pre, row.position, a.activation.gated() ? 2 * a.activated : a.activated);
        zero_columns(a.weighted_act, row.position, a.activated);
        continue;
      }
      float sum;
      if constexpr (Packs) {
        sum = backward_packs<T, L>(a, row);
      } else {
        sum = backward_elements(a, row);
      }
      if (!a.d_weights) continue;
      if (a.down_bias.data) sum += bias_share<T>(a, row);
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(kFullMask, sum, distance);
      }
      if (lane == 0) {
        store_float(a.d_weights, a.d_weights_dtype, row.flat, sum);
      }
    }
  }
}

template <typename T>
const void* packed_kernel(GateLayout layout) {
  switch (layout) {
    case GateLayout::kNone:
      return reinterpret_cast<const void*>(&backward_kernel<true, T, GateLayout::kNone>);
    case GateLayout::kConcatenated:
      return reinterpret_cast<const void*>(&backward_kernel<true, T, GateLayout::kConcatenated>);
    case GateLayout::kInterleaved:
      break;
  }
  return reinterpret_cast<const void*>(&backward_kernel<true, T, GateLayout::kInterleaved>);
}

const void* packed_kernel(DType dtype, GateLayout layout) {
  switch (dtype) {
    case DType::kFloat16:
      return packed_kernel<__half>(layout);
    case DType::kBFloat16:
      return packed_kernel<__nv_bfloat16>(layout);
    default:
      return packed_kernel<float>(layout);
  }
}

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
  require_activation_limits(rows, std::max(in.pre.shape[1], hidden), experts, in.pre.device);
  // Groups are as large as keeps the warps of all resident blocks busy.
  const std::int64_t resident =
      kBlocksPerMultiprocessor * device_facts(in.pre.device.index)->multiprocessors;
  const std::int64_t group = std::clamp<std::int64_t>(rows / (resident * kWarps), 1, 8);
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
      .packed_hidden = aligned_if_given(in.d_out) && aligned_if_given(in.down_bias),
      .group_rows = static_cast<int>(group),
      .activation = activation,
      .columns = gate_columns(activation, activated),
  };
  const bool packed = activated % kPackElems == 0 && in.d_act.dtype == in.pre.dtype &&
                      is_16_byte_aligned(in.pre) && is_16_byte_aligned(in.d_act) &&
                      aligned_if_given(in.bias) && is_16_byte_aligned(out.d_pre) &&
                      aligned_if_given(out.weighted_act);
  if (!packed) arguments.packed_hidden = false;
  if (out.d_weights.given()) {
    // All zero bits are zero in every floating dtype.
    check(cudaMemsetAsync(out.d_weights.data, 0,
                          static_cast<std::size_t>(rows * size_bytes(out.d_weights.dtype)), stream),
          "clear d_weights for activate_backward");
  }
  const std::int64_t groups = (rows + group - 1) / group;
  const std::int64_t blocks = std::min((groups + kWarps - 1) / kWarps, resident);
  void* parameters[] = {&arguments};
  launch({packed ? packed_kernel(in.pre.dtype, activation.layout)
                 : reinterpret_cast<const void*>(&backward_kernel<false, float, GateLayout::kNone>),
          packed ? "activate_backward (packs)" : "activate_backward (elements)",
          dim3(static_cast<unsigned>(blocks)), dim3(kThreads), row_prefix_bytes(experts)},
         parameters, stream);
}

}  // namespace moegemm::cuda
