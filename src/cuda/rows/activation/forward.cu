#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/host/device_facts.h"
#include "cuda/host/launch.h"
#include "cuda/rows/activation/activation.h"
#include "cuda/rows/activation/limits.h"
#include "cuda/rows/activation/math.cuh"
#include "cuda/rows/activation/row_experts.cuh"
#include "cuda/rows/alignment.h"

/// act = activation(pre + bias). A thread takes packs of eight elements (or single elements, when
/// the memory is not 16-byte aligned) from all rows; blocks stay, because each has to add up
/// m_sizes first.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 3;
/// Packs of a thread whose loads are in flight together: 8 loads of 16 bytes with a gate, as in
/// combine.cu.
template <typename T>
constexpr int kInFlight = sizeof(T) == 2 ? 4 : 2;

struct ActivateArguments {
  const void* pre;  // [rows, C]
  DType pre_dtype;
  std::int64_t pre_stride;
  const void* bias;  // [experts, C] or null
  std::int64_t bias_stride;
  void* act;  // [rows, activated]
  DType act_dtype;
  std::int64_t act_stride;
  IndexArray m_sizes;
  int experts;
  int rows;
  int activated;
  int items_per_row;
  std::int64_t items;
  Activation activation;
  GateColumns columns;
};

/// Row and column of an item; columns count in units of `unit`.
struct ItemPlace {
  int row;
  int column;
};

__device__ __forceinline__ ItemPlace place_of(const ActivateArguments& a, std::int64_t item,
                                              int unit) {
  if (a.items <= 0xffffffffLL) {  // a 32-bit division is several times cheaper
    const auto narrow = static_cast<unsigned>(item);
    const auto divisor = static_cast<unsigned>(a.items_per_row);
    return {static_cast<int>(narrow / divisor), static_cast<int>(narrow % divisor) * unit};
  }
  return {static_cast<int>(item / a.items_per_row),
          static_cast<int>(item % a.items_per_row) * unit};
}

template <typename T, GateLayout L>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    activate_packs(const ActivateArguments a) {
  constexpr int kPacks = kInFlight<T>;
  constexpr bool kGated = L != GateLayout::kNone;
  extern __shared__ int row_prefix[];
  share_row_prefix(a.m_sizes, a.experts, a.rows, row_prefix);
  const int routed = row_prefix[a.experts];
  const T* const pre = static_cast<const T*>(a.pre);
  const T* const bias = static_cast<const T*>(a.bias);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads * kPacks;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kThreads * kPacks +
                            static_cast<int>(threadIdx.x);
       first < a.items; first += step) {
    GatePacks<T, L> loaded[kPacks];
    ItemPlace places[kPacks];
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const std::int64_t item = first + j * kThreads;
      places[j] = item < a.items ? place_of(a, item, kPackElems) : ItemPlace{-1, 0};
      if (places[j].row >= 0 && places[j].row < routed) {
        loaded[j] = GatePacks<T, L>::load(pre + places[j].row * a.pre_stride, places[j].column,
                                          a.activated);
      }
    }
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const auto [row, column] = places[j];
      if (row < 0) continue;
      float act[kPackElems] = {};
      if (row < routed) {
        float gate[kPackElems], up[kPackElems];
        loaded[j].split(gate, up);
        if (bias) {
          const T* const expert_bias = bias + expert_of(row_prefix, a.experts, row) * a.bias_stride;
          float gate_bias[kPackElems], up_bias[kPackElems];
          GatePacks<T, L>::load(expert_bias, column, a.activated).split(gate_bias, up_bias);
#pragma unroll
          for (int i = 0; i < kPackElems; ++i) {
            gate[i] += gate_bias[i];
            if constexpr (kGated) up[i] += up_bias[i];
          }
        }
        with_function(a.activation.function, [&]<ActivationFunction F>() {
#pragma unroll
          for (int i = 0; i < kPackElems; ++i) {
            act[i] = evaluate<F, kGated>(a.activation, gate[i], kGated ? up[i] : 0.0f).act;
          }
        });
      }
      store_pack(a.act, a.act_dtype, row * a.act_stride + column, act);
    }
  }
}

__device__ float biased(const ActivateArguments& a, int row, int column, int expert) {
  const float value = load_float(a.pre, a.pre_dtype, row * a.pre_stride + column);
  return a.bias ? value + load_float(a.bias, a.pre_dtype, expert * a.bias_stride + column) : value;
}

__global__ void __launch_bounds__(kThreads) activate_elements(const ActivateArguments a) {
  extern __shared__ int row_prefix[];
  share_row_prefix(a.m_sizes, a.experts, a.rows, row_prefix);
  const int routed = row_prefix[a.experts];
  const bool gated = a.activation.gated();
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t item =
           static_cast<std::int64_t>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
       item < a.items; item += step) {
    const auto [row, column] = place_of(a, item, 1);
    float act = 0.0f;
    if (row < routed) {
      const int expert = a.bias ? expert_of(row_prefix, a.experts, row) : 0;
      const float gate = biased(a, row, a.columns.gate_at(column), expert);
      const float up = gated ? biased(a, row, a.columns.up_at(column), expert) : 0.0f;
      with_function(a.activation.function, [&]<ActivationFunction F>() {
        act = gated ? evaluate<F, true>(a.activation, gate, up).act
                    : evaluate<F, false>(a.activation, gate, up).act;
      });
    }
    store_float(a.act, a.act_dtype, row * a.act_stride + column, act);
  }
}

template <typename T>
const void* packed_kernel(GateLayout layout) {
  switch (layout) {
    case GateLayout::kNone:
      return reinterpret_cast<const void*>(&activate_packs<T, GateLayout::kNone>);
    case GateLayout::kConcatenated:
      return reinterpret_cast<const void*>(&activate_packs<T, GateLayout::kConcatenated>);
    case GateLayout::kInterleaved:
      break;
  }
  return reinterpret_cast<const void*>(&activate_packs<T, GateLayout::kInterleaved>);
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

}  // namespace

void launch_activate(const TensorView& pre, const TensorView& bias, const TensorView& m_sizes,
                     const Activation& activation, const TensorView& act, cudaStream_t stream) {
  const std::int64_t rows = act.shape[0], activated = act.shape[1];
  if (rows == 0 || activated == 0) {
    return;
  }
  require_activation_limits(rows, pre.shape[1], m_sizes.shape[0], pre.device);
  const bool packed = activated % kPackElems == 0 && is_16_byte_aligned(pre) &&
                      is_16_byte_aligned(act) && (!bias.given() || is_16_byte_aligned(bias));
  const std::int64_t items_per_row = packed ? activated / kPackElems : activated;
  ActivateArguments arguments = {
      .pre = pre.data,
      .pre_dtype = pre.dtype,
      .pre_stride = pre.row_stride,
      .bias = bias.given() ? bias.data : nullptr,
      .bias_stride = bias.row_stride,
      .act = act.data,
      .act_dtype = act.dtype,
      .act_stride = act.row_stride,
      .m_sizes = {m_sizes.data, m_sizes.dtype == DType::kInt64},
      .experts = static_cast<int>(m_sizes.shape[0]),
      .rows = static_cast<int>(rows),
      .activated = static_cast<int>(activated),
      .items_per_row = static_cast<int>(items_per_row),
      .items = rows * items_per_row,
      .activation = activation,
      .columns = gate_columns(activation, activated),
  };
  const int packs = pre.dtype == DType::kFloat32 ? kInFlight<float> : kInFlight<__half>;
  const std::int64_t block_items = kThreads * (packed ? packs : 1);
  const std::int64_t resident =
      kBlocksPerMultiprocessor * device_facts(pre.device.index)->multiprocessors;
  const std::int64_t blocks = std::min((arguments.items + block_items - 1) / block_items, resident);
  void* parameters[] = {&arguments};
  launch({packed ? packed_kernel(pre.dtype, activation.layout)
                 : reinterpret_cast<const void*>(&activate_elements),
          packed ? "activate_packs" : "activate_elements", dim3(static_cast<unsigned>(blocks)),
          dim3(kThreads), row_prefix_bytes(m_sizes.shape[0])},
         parameters, stream);
}

}  // namespace moegemm::cuda
