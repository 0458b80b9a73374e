#include <algorithm>
#include <string>

#include "cuda/device/fast_divide.h"
#include "cuda/device/segments.cuh"
#include "cuda/host/launch.h"
#include "cuda/host/loading.h"
#include "cuda/rows/alignment.h"
#include "cuda/rows/combine.h"
#include "cuda/rows/elements.cuh"
#include "moegemm/error.h"

/// out[t] = sum over s of weights[t, s] * (rows[t, s] + bias). A thread makes a pack of eight
/// columns of one token (or one column, when the memory is not 16-byte aligned) and adds the slots
/// in order: an element's bits depend on its own rows alone.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
/// Threads of one launch; a larger sum takes several.
constexpr std::int64_t kMostItems = std::int64_t{1} << 30;

/// Blocks on a multiprocessor, by the 16-byte loads that a thread has in flight: few loads leave
/// registers for many threads. 32 to 96 KB are in flight then; 29 KB hide the latency of HBM
/// (4.2 TB/s * 0.9 us over 132 multiprocessors).
constexpr int blocks_per_multiprocessor(int loads) {
  return loads == 1 ? 8 : loads == 2 ? 6 : loads == 4 ? 4 : 3;
}
constexpr int kMostLoads = 8;
constexpr int kBiasedLoads = 4;  // of rows, and as many of biases
/// Packs of a token that are made side by side, with a bias: those packs of all experts' biases may
/// stay in L1 while all tokens pass by (gpt-oss-120b on an H200: 73 microseconds, 78 token by
/// token).
constexpr std::int64_t kBiasedWidth = 128;

/// Rows of one token whose loads are in flight together: a pack of fp32 takes two loads.
constexpr int slots_in_flight(std::int64_t element_bytes, int loads) {
  return element_bytes == 2 ? loads : loads / 2;
}

struct CombineArguments {
  const void* rows;  // [T * topk, columns]
  DType rows_dtype;
  std::int64_t rows_stride;
  const void* weights;  // [T * topk] or null
  DType weights_dtype;
  int topk;
  int step;          // slots at a time
  const void* bias;  // [experts, columns] in rows' dtype, or null
  std::int64_t bias_stride;
  int experts;
  IndexArray expert_ids;  // [T, topk]
  std::int64_t ids_stride;
  std::int64_t first_column;  // of combine_elements
  void* out;                  // [T, columns]
  DType out_dtype;
  std::int64_t out_stride;
  int first_token;
  int tokens;  // of this launch
  int places;  // packs or columns of a token
  int width;   // places of a token that are made side by side
  int items;   // threads, `width` for each token and each part of a token
  FastDivisor by_width;
  FastDivisor by_tokens;
};

/// What this thread makes: a place in a token.
struct Item {
  int token;
  int place;
};

/// All tokens' first `width` places, then all tokens' next ones. False if there is nothing for this
/// thread.
__device__ __forceinline__ bool find_item(const CombineArguments& a, Item& item) {
  const int index = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (index >= a.items) {
    return false;
  }
  const int run = static_cast<int>(a.by_width.divide(static_cast<unsigned>(index)));
  const int part = static_cast<int>(a.by_tokens.divide(static_cast<unsigned>(run)));
  item = {a.first_token + run - part * a.tokens, part * a.width + index - run * a.width};
  return item.place < a.places;
}

/// One element each, in the order and with the rounding of the packed path.
__global__ void __launch_bounds__(kThreads) combine_elements(const CombineArguments a) {
  Item item;
  if (!find_item(a, item)) {
    return;
  }
  const std::int64_t token = item.token, column = a.first_column + item.place;
  float sum = 0.0f;
#pragma unroll 4
  for (int s = 0; s < a.topk; ++s) {
    const std::int64_t row = token * a.topk + s;
    float value = load_float(a.rows, a.rows_dtype, row * a.rows_stride + column);
    const int expert = a.bias ? a.expert_ids.fetch(token * a.ids_stride + s).below(a.experts) : -1;
    if (expert >= 0) value += load_float(a.bias, a.rows_dtype, expert * a.bias_stride + column);
    sum = fmaf(a.weights ? load_float(a.weights, a.weights_dtype, row) : 1.0f, value, sum);
  }
  store_float(a.out, a.out_dtype, token * a.out_stride + column, sum);
}

/// The weights of rows, in fp32 or the rows' dtype.
template <typename W>
struct GivenWeights {
  const W* weights;
  __device__ __forceinline__ float operator[](std::int64_t row) const {
    return to_float(weights[row]);
  }
};
struct UnitWeights {
  __device__ __forceinline__ float operator[](std::int64_t) const { return 1.0f; }
};

/// Eight columns of a token by 16-byte accesses, up to `Loads` of its rows in flight, and as many
/// of their biases.
template <typename T, int Loads, bool Biased, typename Weights>
__device__ __forceinline__ void combine_pack(const CombineArguments& a, const Item& item,
                                             const Weights& row_weights) {
  constexpr int kSlots = slots_in_flight(sizeof(T), Loads);
  constexpr bool kOneBatch = !Biased && Loads < kMostLoads;
  const int stride = static_cast<int>(a.rows_stride);
  const std::int64_t column = std::int64_t{item.place} * kPackElems;
  const std::int64_t row = std::int64_t{item.token} * a.topk;
  const T* source = static_cast<const T*>(a.rows) + row * stride + column;
  float sums[kPackElems] = {};
  int done = 0;
  do {
    const int count = kOneBatch ? a.topk : min(a.topk - done, a.step);
    IndexArray::Fetched experts[kSlots];
    Pack<T> loaded[kSlots], biases[kSlots];
    float weights[kSlots];
    // First what other loads wait for; then rows before weights: converting a weight waits for it,
    // and the rows should be on their way.
    if constexpr (Biased) {
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        if (j < count) experts[j] = a.expert_ids.fetch(item.token * a.ids_stride + done + j);
      }
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (kSlots == 1 || j < count) {
        loaded[j] = load_pack(source + std::int64_t{done + j} * stride);
      }
    }
    if constexpr (Biased) {
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        const int expert = experts[j].below(a.experts);
        biases[j] =
            expert < 0
                ? Pack<T>{}
                : load_shared_pack(static_cast<const T*>(a.bias) + expert * a.bias_stride + column);
      }
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (kSlots == 1 || j < count) weights[j] = row_weights[row + done + j];
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (kSlots == 1 || j < count) {
        float values[kPackElems];
        unpack(loaded[j], values);
        if constexpr (Biased) {
          float bias[kPackElems];
          unpack(biases[j], bias);
#pragma unroll
          for (int i = 0; i < kPackElems; ++i) {
            values[i] += bias[i];
          }
        }
#pragma unroll
        for (int i = 0; i < kPackElems; ++i) {
          sums[i] = fmaf(weights[j], values[i], sums[i]);
        }
      }
    }
    done += count;
  } while (!kOneBatch && done < a.topk);
  store_pack(a.out, a.out_dtype, item.token * a.out_stride + column, sums);
}

template <typename T, int Loads, bool Biased = false>
__global__ void __launch_bounds__(kThreads, blocks_per_multiprocessor(Biased ? 2 * Loads : Loads))
    combine_packs(const CombineArguments a) {
  Item item;
  if (!find_item(a, item)) {
    return;
  }
  // The branch is out here, as inside it would be between a batch's loads.
  if (!a.weights) {
    combine_pack<T, Loads, Biased>(a, item, UnitWeights());
  } else if (a.weights_dtype == DType::kFloat32) {
    const auto* weights = static_cast<const float*>(a.weights);
    combine_pack<T, Loads, Biased>(a, item, GivenWeights<float>{weights});
  } else if constexpr (sizeof(T) == 2) {
    const auto* weights = static_cast<const T*>(a.weights);
    combine_pack<T, Loads, Biased>(a, item, GivenWeights<T>{weights});
  }
}

template <typename T>
const void* packed_kernel(int loads, bool biased) {
  if (biased) return reinterpret_cast<const void*>(&combine_packs<T, kBiasedLoads, true>);
  if constexpr (sizeof(T) == 2) {
    if (loads == 1) return reinterpret_cast<const void*>(&combine_packs<T, 1>);
  }
  return loads == 2   ? reinterpret_cast<const void*>(&combine_packs<T, 2>)
         : loads == 4 ? reinterpret_cast<const void*>(&combine_packs<T, 4>)
                      : reinterpret_cast<const void*>(&combine_packs<T, kMostLoads>);
}

const void* packed_kernel(DType dtype, int loads, bool biased) {
  switch (dtype) {
    case DType::kFloat16:
      return packed_kernel<__half>(loads, biased);
    case DType::kBFloat16:
      return packed_kernel<__nv_bfloat16>(loads, biased);
    default:
      return packed_kernel<float>(loads, biased);
  }
}

const ListedKernels listed([] {
  std::vector<const void*> kernels;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int loads : {1, 2, 4, kMostLoads}) {
      kernels.push_back(packed_kernel(dtype, loads, false));
    }
    kernels.push_back(packed_kernel(dtype, kBiasedLoads, true));
  }
  return kernels;
});

/// Loads of a thread: as few as keep the slots of a token in one batch.
int loads_per_thread(std::int64_t topk, DType dtype, bool biased) {
  if (biased) return kBiasedLoads;
  for (const int loads : {1, 2, 4}) {
    if (topk <= slots_in_flight(size_bytes(dtype), loads)) {
      return loads;
    }
  }
  return kMostLoads;
}

/// The slots of a batch, all batches alike: ten slots are five and five rather than eight and two.
std::int64_t even_batches(std::int64_t topk, std::int64_t most) {
  const std::int64_t batches = std::max<std::int64_t>((topk + most - 1) / most, 1);
  return (topk + batches - 1) / batches;
}

}  // namespace

void launch_combine(const TensorView& rows, const TensorView& weights, std::int64_t topk,
                    const TensorView& bias, const TensorView& expert_ids, const TensorView& out,
                    cudaStream_t stream) {
  const std::int64_t tokens = out.shape[0], columns = out.shape[1];
  if (tokens == 0 || columns == 0) {
    return;
  }
  const std::int64_t experts = bias.given() ? bias.shape[0] : 0;
  if (std::max({tokens, columns, topk, experts}) > kMostItems) {
    throw Error(
        ErrorKind::kNotImplemented,
        "combine on a GPU takes at most 2^30 tokens, columns, slots of a token and experts, "
        "got " +
            std::to_string(tokens) + ", " + std::to_string(columns) + ", " + std::to_string(topk) +
            " and " + std::to_string(experts));
  }
  const bool packed = is_16_byte_aligned(rows) && rows.row_stride <= INT32_MAX &&
                      is_16_byte_aligned(out) && (!bias.given() || is_16_byte_aligned(bias));
  const int loads = loads_per_thread(topk, rows.dtype, bias.given());
  const std::int64_t packs = packed ? columns / kPackElems : 0;
  const std::int64_t single_columns = columns - packs * kPackElems;  // a row's last, or all
  CombineArguments arguments = {
      .rows = rows.data,
      .rows_dtype = rows.dtype,
      .rows_stride = rows.row_stride,
      .weights = weights.given() ? weights.data : nullptr,
      .weights_dtype = weights.dtype,
      .topk = static_cast<int>(topk),
      .step = static_cast<int>(even_batches(topk, slots_in_flight(size_bytes(rows.dtype), loads))),
      .bias = bias.given() ? bias.data : nullptr,
      .bias_stride = bias.row_stride,
      .experts = static_cast<int>(experts),
      .expert_ids = {expert_ids.data, expert_ids.dtype == DType::kInt64},
      .ids_stride = expert_ids.row_stride,
      .first_column = packs * kPackElems,
      .out = out.data,
      .out_dtype = out.dtype,
      .out_stride = out.row_stride,
      .first_token = 0,
      .tokens = 0,
      .places = 0,
      .width = 0,
      .items = 0,
      .by_width = {},
      .by_tokens = {},
  };
  const auto start = [&](const void* kernel, const char* name, std::int64_t places,
                         std::int64_t most_width) {
    const std::int64_t parts = (places + most_width - 1) / most_width;
    const std::int64_t width = (places + parts - 1) / parts;
    arguments.places = static_cast<int>(places);
    arguments.width = static_cast<int>(width);
    arguments.by_width = make_fast_divisor(static_cast<std::uint32_t>(width));
    const std::int64_t tokens_at_once = std::max<std::int64_t>(kMostItems / (parts * width), 1);
    for (std::int64_t first = 0; first < tokens; first += tokens_at_once) {
      const std::int64_t now = std::min(tokens_at_once, tokens - first);
      arguments.first_token = static_cast<int>(first);
      arguments.tokens = static_cast<int>(now);
      arguments.by_tokens = make_fast_divisor(static_cast<std::uint32_t>(now));
      arguments.items = static_cast<int>(now * parts * width);
      void* parameters[] = {&arguments};
      launch(
          {kernel, name, dim3(static_cast<unsigned>((arguments.items + kThreads - 1) / kThreads)),
           dim3(kThreads)},
          parameters, stream);
    }
  };
  if (packs > 0) {
    start(packed_kernel(rows.dtype, loads, bias.given()), "combine_packs", packs,
          bias.given() ? kBiasedWidth : packs);
  }
  if (single_columns > 0) {
    start(reinterpret_cast<const void*>(&combine_elements), "combine_elements", single_columns,
          single_columns);
  }
}

}  // namespace moegemm::cuda
