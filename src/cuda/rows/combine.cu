#include <string>

#include "cuda/host/launch.h"
#include "cuda/host/loading.h"
#include "cuda/rows/alignment.h"
#include "cuda/rows/combine.h"
#include "cuda/rows/elements.cuh"
#include "moegemm/error.h"

/// out[t] = sum over s of weights[t, s] * rows[t, s]. A thread makes whole packs of eight columns
/// of one token (or one column, when the memory is not 16-byte aligned) and adds the slots in
/// order: an element's bits depend on its own rows alone.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;

/// Rows whose loads are in flight together, when each thread makes `packs` packs: eight 16-byte
/// loads in all, of which a pack of fp32 takes two.
constexpr int slots_in_flight(std::size_t element_bytes, int packs) {
  return (element_bytes == 2 ? 8 : 4) / packs;
}

struct CombineArguments {
  const void* rows;  // [T * topk, columns]
  DType rows_dtype;
  std::int64_t rows_stride;
  const void* weights;  // [T * topk] or null
  DType weights_dtype;
  int topk;
  const void* bias;  // [experts, columns] in rows' dtype, or null
  std::int64_t bias_stride;
  std::int64_t experts;
  const void* expert_ids;  // [T, topk]
  bool ids_64_bit;
  std::int64_t ids_stride;
  std::int64_t columns;
  void* out;  // [T, columns]
  DType out_dtype;
  std::int64_t out_stride;
  std::int64_t items;            // threads that have work
  std::int64_t items_per_token;  // of those
};

/// The token of this thread, and its place in the token; false if there is none.
__device__ bool find_item(const CombineArguments& a, std::int64_t& token, std::int64_t& place) {
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= a.items) {
    return false;
  }
  if (a.items <= 0xffffffffLL) {  // a 32-bit division is several times cheaper
    const auto narrow = static_cast<unsigned>(item);
    const auto divisor = static_cast<unsigned>(a.items_per_token);
    token = narrow / divisor;
    place = narrow % divisor;
  } else {
    token = item / a.items_per_token;
    place = item % a.items_per_token;
  }
  return true;
}

/// The expert whose bias slot s of a token gets, or -1.
__device__ std::int64_t bias_expert(const CombineArguments& a, std::int64_t token, int s) {
  const std::int64_t expert = load_index(a.expert_ids, a.ids_64_bit, token * a.ids_stride + s);
  return expert >= 0 && expert < a.experts ? expert : -1;
}

__device__ float weight_of(const CombineArguments& a, std::int64_t row) {
  return a.weights ? load_float(a.weights, a.weights_dtype, row) : 1.0f;
}

/// Adds the slots' biases, weighted, to eight columns of a token.
template <typename T>
__device__ void add_bias_pack(const CombineArguments& a, std::int64_t token, std::int64_t column,
                              float (&sums)[kPackElems]) {
  for (int s = 0; s < a.topk; ++s) {
    const std::int64_t expert = bias_expert(a, token, s);
    if (expert < 0) continue;
    const float weight = weight_of(a, token * a.topk + s);
    float values[kPackElems];
    unpack(load_pack(static_cast<const T*>(a.bias) + expert * a.bias_stride + column), values);
#pragma unroll
    for (int i = 0; i < kPackElems; ++i) {
      sums[i] = fmaf(weight, values[i], sums[i]);
    }
  }
}

/// One element, in the order and with the rounding of the packed path.
__device__ void combine_element(const CombineArguments& a, std::int64_t token,
                                std::int64_t column) {
  const std::int64_t first_row = token * a.topk;
  float sum = 0.0f;
#pragma unroll 4
  for (int s = 0; s < a.topk; ++s) {
    const float value = load_float(a.rows, a.rows_dtype, (first_row + s) * a.rows_stride + column);
    sum = fmaf(weight_of(a, first_row + s), value, sum);
  }
  for (int s = 0; a.bias && s < a.topk; ++s) {
    const std::int64_t expert = bias_expert(a, token, s);
    if (expert < 0) continue;
    const float value = load_float(a.bias, a.rows_dtype, expert * a.bias_stride + column);
    sum = fmaf(weight_of(a, first_row + s), value, sum);
  }
  store_float(a.out, a.out_dtype, token * a.out_stride + column, sum);
}

__global__ void __launch_bounds__(kThreads) combine_elements(const CombineArguments a) {
  std::int64_t token, column;
  if (find_item(a, token, column)) {
    combine_element(a, token, column);
  }
}

/// 16-byte accesses. A thread makes `Packs` packs of one token, `items_per_token` packs apart so
/// that neighbouring threads stay on neighbouring memory. It has eight loads of 16 bytes in flight,
/// which are slots or, with few slots, packs: 128 bytes for each of 768 threads on a multiprocessor
/// are three times what hides the latency of HBM (4.2 TB/s * 0.9 us over 132 of them: 29 KB each).
/// With 32 bytes (two slots of one pack) an H200 reached 0.67 of its copy bandwidth.
template <typename T, int Packs>
__global__ void __launch_bounds__(kThreads, 3) combine_packs(const CombineArguments a) {
  constexpr int kSlots = slots_in_flight(sizeof(T), Packs);
  std::int64_t token, place;
  if (!find_item(a, token, place)) {
    return;
  }
  const std::int64_t first_row = token * a.topk;
  const T* const source = static_cast<const T*>(a.rows) + first_row * a.rows_stride;
  const auto column_of = [&](int p) { return (place + p * a.items_per_token) * kPackElems; };
  const auto is_whole = [&](int p) { return column_of(p) + kPackElems <= a.columns; };
  float sums[kPackElems] = {};
  for (int first = 0; first < a.topk; first += kSlots) {  // once, if Packs > 1
    Pack<T> loaded[Packs][kSlots];
    float weights[kSlots];
    // Rows before weights: converting a weight waits for it, and the rows should be on their way.
#pragma unroll
    for (int p = 0; p < Packs; ++p) {
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        if (first + j < a.topk && is_whole(p)) {
          loaded[p][j] = load_pack(source + (first + j) * a.rows_stride + column_of(p));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      weights[j] = a.weights && first + j < a.topk
                       ? load_float(a.weights, a.weights_dtype, first_row + first + j)
                       : 1.0f;
    }
#pragma unroll
    for (int p = 0; p < Packs; ++p) {
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        if (first + j < a.topk && is_whole(p)) {
          float values[kPackElems];
          unpack(loaded[p][j], values);
#pragma unroll
          for (int i = 0; i < kPackElems; ++i) {
            sums[i] = fmaf(weights[j], values[i], sums[i]);
          }
        }
      }
      if (first + kSlots >= a.topk && is_whole(p)) {
        if (a.bias) add_bias_pack<T>(a, token, column_of(p), sums);
        store_pack(a.out, a.out_dtype, token * a.out_stride + column_of(p), sums);
#pragma unroll
        for (float& sum : sums) {
          sum = 0.0f;
        }
      }
    }
  }
  // The last columns, when they do not fill a pack.
  for (int p = 0; p < Packs; ++p) {
    for (std::int64_t c = column_of(p); !is_whole(p) && c < a.columns; ++c) {
      combine_element(a, token, c);
    }
  }
}

template <typename T>
const void* packed_kernel(int packs) {
  return packs == 4   ? reinterpret_cast<const void*>(&combine_packs<T, 4>)
         : packs == 2 ? reinterpret_cast<const void*>(&combine_packs<T, 2>)
                      : reinterpret_cast<const void*>(&combine_packs<T, 1>);
}

const void* packed_kernel(DType dtype, int packs) {
  switch (dtype) {
    case DType::kFloat16:
      return packed_kernel<__half>(packs);
    case DType::kBFloat16:
      return packed_kernel<__nv_bfloat16>(packs);
    default:
      return packed_kernel<float>(packs);
  }
}

const ListedKernels listed([] {
  std::vector<const void*> kernels;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int packs : {1, 2, 4}) {
      kernels.push_back(packed_kernel(dtype, packs));
    }
  }
  return kernels;
});

/// Packs of a thread: as many as keep the slots of a token in one batch.
int packs_per_thread(std::int64_t topk, DType dtype) {
  for (const int packs : {4, 2}) {
    if (topk <= slots_in_flight(size_bytes(dtype), packs)) {
      return packs;
    }
  }
  return 1;
}

}  // namespace

void launch_combine(const TensorView& rows, const TensorView& weights, std::int64_t topk,
                    const TensorView& bias, const TensorView& expert_ids, const TensorView& out,
                    cudaStream_t stream) {
  const std::int64_t tokens = out.shape[0], columns = out.shape[1];
  if (tokens == 0 || columns == 0) {
    return;
  }
  const bool packed = is_16_byte_aligned(rows) && is_16_byte_aligned(out) &&
                      (!bias.given() || is_16_byte_aligned(bias));
  const int packs = packed ? packs_per_thread(topk, rows.dtype) : 1;
  const std::int64_t columns_per_item = packed ? kPackElems * packs : 1;
  const std::int64_t per_token = (columns + columns_per_item - 1) / columns_per_item;
  CombineArguments arguments = {
      .rows = rows.data,
      .rows_dtype = rows.dtype,
      .rows_stride = rows.row_stride,
      .weights = weights.given() ? weights.data : nullptr,
      .weights_dtype = weights.dtype,
      .topk = static_cast<int>(topk),
      .bias = bias.given() ? bias.data : nullptr,
      .bias_stride = bias.row_stride,
      .experts = bias.given() ? bias.shape[0] : 0,
      .expert_ids = expert_ids.data,
      .ids_64_bit = expert_ids.dtype == DType::kInt64,
      .ids_stride = expert_ids.row_stride,
      .columns = columns,
      .out = out.data,
      .out_dtype = out.dtype,
      .out_stride = out.row_stride,
      .items = tokens * per_token,
      .items_per_token = per_token,
  };
  const std::int64_t blocks = (arguments.items + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX || topk > INT32_MAX) {
    throw Error(ErrorKind::kNotImplemented, "combine on a GPU: out has " +
                                                std::to_string(tokens * columns) +
                                                " elements, more than one launch covers");
  }
  void* parameters[] = {&arguments};
  launch(
      {packed ? packed_kernel(rows.dtype, packs) : reinterpret_cast<const void*>(&combine_elements),
       packed ? "combine_packs" : "combine_elements", dim3(static_cast<unsigned>(blocks)),
       dim3(kThreads)},
      parameters, stream);
}

}  // namespace moegemm::cuda
