#include <string>

#include "cuda/host/launch.h"
#include "cuda/rows/alignment.h"
#include "cuda/rows/combine.h"
#include "cuda/rows/elements.cuh"
#include "moegemm/error.h"

/// out[t] = sum over s of weights[t, s] * rows[t, s]. A thread makes eight neighbouring columns of
/// one token (or one column, when the memory is not 16-byte aligned) and adds the slots in order:
/// an element's bits depend on its own row alone.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;

struct CombineArguments {
  const void* rows;  // [T * topk, columns]
  DType rows_dtype;
  std::int64_t rows_stride;
  const void* weights;  // [T * topk] or null
  DType weights_dtype;
  int topk;
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

/// One element, in the order and with the rounding of the packed path.
__device__ void combine_element(const CombineArguments& a, std::int64_t token,
                                std::int64_t column) {
  const std::int64_t first_row = token * a.topk;
  float sum = 0.0f;
#pragma unroll 4
  for (int s = 0; s < a.topk; ++s) {
    const float value = load_float(a.rows, a.rows_dtype, (first_row + s) * a.rows_stride + column);
    const float weight = a.weights ? load_float(a.weights, a.weights_dtype, first_row + s) : 1.0f;
    sum = fmaf(weight, value, sum);
  }
  store_float(a.out, a.out_dtype, token * a.out_stride + column, sum);
}

__global__ void __launch_bounds__(kThreads) combine_elements(const CombineArguments a) {
  std::int64_t token, column;
  if (find_item(a, token, column)) {
    combine_element(a, token, column);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 3) combine_packs(const CombineArguments a) {
  // 128 bytes in flight per thread: with 768 threads on a multiprocessor three times what hides the
  // latency of HBM (4.2 TB/s * 0.9 us over 132 of them: 29 KB each).
  constexpr int kInFlight = sizeof(T) == 2 ? 8 : 4;
  std::int64_t token, pack;
  if (!find_item(a, token, pack)) {
    return;
  }
  const std::int64_t column = pack * kPackElems;
  if (column + kPackElems > a.columns) {
    for (std::int64_t c = column; c < a.columns; ++c) {
      combine_element(a, token, c);
    }
    return;
  }
  const std::int64_t first_row = token * a.topk;
  const T* const source = static_cast<const T*>(a.rows) + first_row * a.rows_stride + column;
  float sums[kPackElems] = {};
  for (int first = 0; first < a.topk; first += kInFlight) {
    Pack<T> loaded[kInFlight];
    float weights[kInFlight];
    // Rows before weights: converting a weight waits for it, and the rows should be on their way.
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + j < a.topk) {
        loaded[j] = load_pack(source + (first + j) * a.rows_stride);
      }
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      weights[j] = a.weights && first + j < a.topk
                       ? load_float(a.weights, a.weights_dtype, first_row + first + j)
                       : 1.0f;
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + j < a.topk) {
        float values[kPackElems];
        unpack(loaded[j], values);
#pragma unroll
        for (int i = 0; i < kPackElems; ++i) {
          sums[i] = fmaf(weights[j], values[i], sums[i]);
        }
      }
    }
  }
  store_pack(a.out, a.out_dtype, token * a.out_stride + column, sums);
}

const void* packed_kernel(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return reinterpret_cast<const void*>(&combine_packs<__half>);
    case DType::kBFloat16:
      return reinterpret_cast<const void*>(&combine_packs<__nv_bfloat16>);
    default:
      return reinterpret_cast<const void*>(&combine_packs<float>);
  }
}

}  // namespace

void launch_combine(const TensorView& rows, const TensorView& weights, std::int64_t topk,
                    const TensorView& out, cudaStream_t stream) {
  const std::int64_t tokens = out.shape[0], columns = out.shape[1];
  if (tokens == 0 || columns == 0) {
    return;
  }
  const bool packed = is_16_byte_aligned(rows) && is_16_byte_aligned(out);
  const std::int64_t per_token = packed ? (columns + kPackElems - 1) / kPackElems : columns;
  CombineArguments arguments = {
      .rows = rows.data,
      .rows_dtype = rows.dtype,
      .rows_stride = rows.row_stride,
      .weights = weights.given() ? weights.data : nullptr,
      .weights_dtype = weights.dtype,
      .topk = static_cast<int>(topk),
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
  launch({packed ? packed_kernel(rows.dtype) : reinterpret_cast<const void*>(&combine_elements),
          packed ? "combine_packs" : "combine_elements", dim3(static_cast<unsigned>(blocks)),
          dim3(kThreads)},
         parameters, stream);
}

}  // namespace moegemm::cuda
