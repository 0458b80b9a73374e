#include <algorithm>
#include <string>

#include "cuda/backend/launch/launch.h"
#include "cuda/backend/launch/loading.h"
#include "cuda/device/fast_divide.h"
#include "cuda/passes/alignment.h"
#include "cuda/passes/combine/positions.cuh"
#include "cuda/passes/early_start.cuh"
#include "cuda/passes/elements.cuh"
#include "cuda/passes/passes.h"
#include "cuda/ptx/griddepcontrol.cuh"
#include "moegemm/error.h"

/// out[t] = sum over s of weights[t, s] * rows[t, s], or of rows[positions[t, s]]. A thread makes a
/// pack of eight columns of one token (or one column, when the memory is not 16-byte aligned) and
/// adds the slots in order: an element's bits depend on its own rows alone. Packs by position have
/// a kernel of their own: positions.cuh.
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

/// Rows of one token whose loads are in flight together: a pack of fp32 takes two loads.
constexpr int slots_in_flight(std::int64_t element_bytes, int loads) {
  return element_bytes == 2 ? loads : loads / 2;
}

struct CombineArguments {
  Floats rows;     // [T * topk, columns]; by position [row_count, columns]
  Floats weights;  // [T * topk]
  int topk;
  int step;                   // slots at a time
  std::int64_t first_column;  // of combine_elements
  Floats out;                 // [T, columns]
  int first_token;
  int places;  // packs or columns of a token
  int items;   // threads, one for each place of this launch's tokens
  FastDivisor by_places;
  IndexArray positions;  // [T * topk], or null
  std::int64_t row_count;
};

/// What this thread makes: a place in a token.
struct Item {
  int token;
  int place;
};

/// False if there is nothing for this thread.
__device__ __forceinline__ bool find_item(const CombineArguments& a, Item& item) {
  const int index = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (index >= a.items) {
    return false;
  }
  const int token = static_cast<int>(a.by_places.divide(static_cast<unsigned>(index)));
  item = {a.first_token + token, index - token * a.places};
  return true;
}

/// The row of a slot, or -1 for none.
__device__ __forceinline__ std::int64_t row_at(const CombineArguments& a, std::int64_t slot) {
  const std::int64_t row = a.positions[slot];
  return row >= 0 && row < a.row_count ? row : -1;
}

/// One element each, in the order and with the rounding of the packed path.
template <bool ByPosition>
__global__ void __launch_bounds__(kThreads) combine_elements(const CombineArguments a) {
  Item item;
  if (!find_item(a, item)) {
    return;
  }
  const std::int64_t token = item.token, column = a.first_column + item.place;
  float sum = 0.0f;
#pragma unroll 2
  for (int s = 0; s < a.topk; ++s) {
    const std::int64_t slot = token * a.topk + s;
    const std::int64_t row = ByPosition ? row_at(a, slot) : slot;
    if (ByPosition && row < 0) continue;
    const float value = a.rows.load(row * a.rows.stride + column);
    sum = fmaf(a.weights.data ? a.weights.load(slot) : 1.0f, value, sum);
  }
  a.out.store(token * a.out.stride + column, sum);
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

/// Eight columns of a token by 16-byte accesses, up to `Loads` of them in flight.
template <typename T, int Loads, typename Weights>
__device__ __forceinline__ void combine_pack(const CombineArguments& a, const Item& item,
                                             const Weights& row_weights) {
  constexpr int kSlots = slots_in_flight(sizeof(T), Loads);
  constexpr bool kOneBatch = Loads < kMostLoads;
  const int stride = static_cast<int>(a.rows.stride);
  const std::int64_t column = std::int64_t{item.place} * kPackElems;
  const std::int64_t row = std::int64_t{item.token} * a.topk;
  const T* source = static_cast<const T*>(a.rows.data) + row * stride + column;
  float sums[kPackElems] = {};
  int done = 0;
  do {
    const int count = kOneBatch ? a.topk : min(a.topk - done, a.step);
    Pack<T> loaded[kSlots];
    float weights[kSlots];
    const auto counts = [&](int j) { return kSlots == 1 || j < count; };
    // Rows before weights: converting a weight waits for it, and the rows should be on their way.
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (counts(j)) loaded[j] = load_pack(source + std::int64_t{done + j} * stride);
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (counts(j)) weights[j] = row_weights[row + done + j];
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (counts(j)) {
        float values[kPackElems];
        unpack(loaded[j], values);
#pragma unroll
        for (int i = 0; i < kPackElems; ++i) {
          sums[i] = fmaf(weights[j], values[i], sums[i]);
        }
      }
    }
    done += count;
  } while (!kOneBatch && done < a.topk);
  store_pack(a.out.data, a.out.dtype, item.token * a.out.stride + column, sums);
}

template <typename T, int Loads>
__global__ void __launch_bounds__(kThreads, blocks_per_multiprocessor(Loads))
    combine_packs(const CombineArguments a) {
  ptx::griddepcontrol_wait();
  Item item;
  if (!find_item(a, item)) {
    return;
  }
  // The branch is out here, as inside it would be between a batch's loads.
  if (!a.weights.data) {
    combine_pack<T, Loads>(a, item, UnitWeights());
  } else if (a.weights.dtype == DType::kFloat32) {
    const auto* weights = static_cast<const float*>(a.weights.data);
    combine_pack<T, Loads>(a, item, GivenWeights<float>{weights});
  } else if constexpr (sizeof(T) == 2) {
    const auto* weights = static_cast<const T*>(a.weights.data);
    combine_pack<T, Loads>(a, item, GivenWeights<T>{weights});
  }
}

template <typename T>
const void* packed_kernel(int loads) {
  if constexpr (sizeof(T) == 2) {
    if (loads == 1) return reinterpret_cast<const void*>(&combine_packs<T, 1>);
  }
  return loads == 2   ? reinterpret_cast<const void*>(&combine_packs<T, 2>)
         : loads == 4 ? reinterpret_cast<const void*>(&combine_packs<T, 4>)
                      : reinterpret_cast<const void*>(&combine_packs<T, kMostLoads>);
}

const void* packed_kernel(DType dtype, int loads) {
  return with_format(FloatingFormats(), dtype,
                     [&]<DType D>() { return packed_kernel<ElementType<D>>(loads); });
}

template <typename T>
const void* positioned_address() {
  return reinterpret_cast<const void*>(&combine_positioned<T>);
}

const void* positioned_kernel(DType dtype) {
  return with_format(FloatingFormats(), dtype,
                     [&]<DType D>() { return positioned_address<ElementType<D>>(); });
}

const ListedKernels listed([] {
  std::vector<const void*> kernels;
  for_each_format(TensorCoreFormats(), [&]<DType D>() {
    for (const int loads : {1, 2, 4, kMostLoads}) {
      kernels.push_back(packed_kernel(D, loads));
    }
    kernels.push_back(positioned_kernel(D));
  });
  return kernels;
});

/// For few tokens the launch itself is what takes time: it starts before the second product has
/// ended. Qwen3-30B on an H200 0.7 microseconds less at one token, nothing at 64.
constexpr std::int64_t kFewTokens = 64;

/// Loads of a thread: as few as keep the slots of a token in one batch.
int loads_per_thread(std::int64_t topk, DType dtype) {
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

/// The first `packs` packs of every token, by position. They start early, whatever their number:
/// positions may come while the product's last tiles are made.
void launch_positioned(const CombineArguments& of, std::int64_t tokens, std::int64_t packs,
                       bool early, const ExecutionContext& context) {
  const std::int64_t turns = (packs + kWarpSize - 1) / kWarpSize;
  const std::int64_t tokens_each = tokens_of_warp(tokens, of.topk, turns);
  const std::int64_t tokens_at_once = kMostItems / turns * tokens_each;
  for (std::int64_t first = 0; first < tokens; first += tokens_at_once) {
    const std::int64_t now = std::min(tokens_at_once, tokens - first);
    const std::int64_t warps = (now + tokens_each - 1) / tokens_each * turns;
    PositionedArguments arguments = {
        .rows = of.rows,
        .weights = of.weights,
        .out = of.out,
        .positions = of.positions,
        .row_count = of.row_count,
        .first_token = first,
        .topk = of.topk,
        .tokens = static_cast<int>(now),
        .tokens_of_warp = static_cast<int>(tokens_each),
        .packs = static_cast<int>(packs),
        .turns = static_cast<int>(turns),
        .warps = static_cast<unsigned>(warps),
        .by_turns = make_fast_divisor(static_cast<std::uint32_t>(turns)),
        .rows_pending = context.ahead == LaunchAhead::kWritesRows,
    };
    void* parameters[] = {&arguments};
    const std::int64_t blocks = (warps * kWarpSize + kPositionedThreads - 1) / kPositionedThreads;
    launch({positioned_kernel(of.rows.dtype), "combine_positioned",
            dim3(static_cast<unsigned>(blocks)), dim3(kPositionedThreads), 0, early},
           parameters, static_cast<cudaStream_t>(context.stream));
  }
}

}  // namespace

void CudaPasses::combine(const TensorView& rows, const TensorView& weights,
                         const TensorView& positions, std::int64_t topk, const TensorView& out,
                         const ExecutionContext& context) const {
  const PassLaunch on(rows.device, context);
  const std::int64_t tokens = out.shape[0], columns = out.shape[1];
  if (tokens == 0 || columns == 0) {
    return;
  }
  const bool by_position = positions.given();
  if (std::max({tokens, columns, topk, by_position ? rows.shape[0] : 0}) > kMostItems) {
    throw Error(
        ErrorKind::kNotImplemented,
        "combine on a GPU takes at most 2^30 tokens, rows by position, columns and slots of a "
        "token, got " +
            std::to_string(tokens) + ", " + std::to_string(rows.shape[0]) + ", " +
            std::to_string(columns) + " and " + std::to_string(topk));
  }
  const bool packed =
      is_16_byte_aligned(rows) && rows.row_stride <= INT32_MAX && is_16_byte_aligned(out);
  const int loads = loads_per_thread(topk, rows.dtype);
  const std::int64_t packs = packed ? columns / kPackElems : 0;
  const std::int64_t single_columns = columns - packs * kPackElems;  // a row's last, or all
  CombineArguments arguments = {
      .rows = floats_of(rows),
      .weights = floats_of(weights),
      .topk = static_cast<int>(topk),
      .step = static_cast<int>(even_batches(topk, slots_in_flight(size_bytes(rows.dtype), loads))),
      .first_column = packs * kPackElems,
      .out = floats_of(out),
      .first_token = 0,
      .places = 0,
      .items = 0,
      .by_places = {},
      .positions = indices_of(positions),
      .row_count = rows.shape[0],
  };
  const auto start = [&](const void* kernel, const char* name, std::int64_t places, bool early) {
    arguments.places = static_cast<int>(places);
    arguments.by_places = make_fast_divisor(static_cast<std::uint32_t>(places));
    const std::int64_t tokens_at_once = kMostItems / places;
    for (std::int64_t first = 0; first < tokens; first += tokens_at_once) {
      const std::int64_t now = std::min(tokens_at_once, tokens - first);
      arguments.first_token = static_cast<int>(first);
      arguments.items = static_cast<int>(now * places);
      void* parameters[] = {&arguments};
      launch(
          {kernel, name, dim3(static_cast<unsigned>((arguments.items + kThreads - 1) / kThreads)),
           dim3(kThreads), 0, early},
          parameters, on.stream);
    }
  };
  const bool may_start_early = starts_early<__CUDA_ARCH_LIST__>(rows.device, context);
  if (packs > 0 && by_position) {
    launch_positioned(arguments, tokens, packs, may_start_early, context);
  } else if (packs > 0) {
    start(packed_kernel(rows.dtype, loads), "combine_packs", packs,
          may_start_early && tokens <= kFewTokens);
  }
  if (single_columns > 0) {
    start(by_position ? reinterpret_cast<const void*>(&combine_elements<true>)
                      : reinterpret_cast<const void*>(&combine_elements<false>),
          "combine_elements", single_columns, false);
  }
}

}  // namespace moegemm::cuda
