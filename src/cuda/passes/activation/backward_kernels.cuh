#pragma once

#include <cstdint>

#include "cuda/device/activation_math.cuh"
#include "cuda/passes/activation/gate_packs.cuh"
#include "cuda/passes/activation/row_experts.cuh"
#include "cuda/passes/block_sums.cuh"
#include "cuda/passes/thread_ring.cuh"

/// The gradient of an activation, its weighted value and the gradient of the weight, in one pass. A
/// block has a few consecutive rows, whose strips of 256 columns its warps share. Dot products are
/// added in a fixed order: lanes in a tree, then strips. What is not 16-byte aligned goes element
/// by element, one warp per row. An element is read before it is written, by the same warp:
/// weighted_act may be d_act.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
/// Of 64 registers each. Older GPUs take a few more, and three blocks fit; fp32 takes some 100.
constexpr int kBlocksPerMultiprocessor = 4;
template <typename T>
constexpr int least_resident_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return 3;
#else
  return sizeof(T) == 2 ? kBlocksPerMultiprocessor : 2;
#endif
}
/// The same for segments anywhere, whose loop keeps more.
template <typename T>
constexpr int least_resident_segment_blocks() {
  return sizeof(T) == 2 ? least_resident_blocks<T>() - 1 : 1;
}
/// 144 bytes in flight for each of 1024 threads on a multiprocessor: five times what hides the
/// latency of HBM (4.2 TB/s * 0.9 us over 132 of them: 29 KB each), so that warps may compute. With
/// more, what a block looks up before its first row waits longer in line.
constexpr int kStages = 3;
/// Strips of a block, unless one row has more. Blocks look up their rows and add m_sizes before the
/// first of them, and with a bias a warp should meet its columns in some rows; but with few strips
/// what all blocks work on at one time lies close together, and the last of them end together. Over
/// six models an H200 reached 0.92 to 0.96 of its copy bandwidth with 48, 0.89 to 0.96 with 96 and
/// 0.64 to 0.96 with 16.
constexpr int kStripsOfBlock = 48;
constexpr int kMostRows = kStripsOfBlock;
static_assert(kMostRows <= kThreads);  // each is looked up by a thread of its own
constexpr int kMostStrips = 4096;      // of a row: dot products are kept in shared memory

struct BackwardArguments {
  Floats pre;
  Floats bias;  // of pre's dtype, as d_out and down_bias
  Floats d_act;
  Floats d_out;
  Floats down_bias;
  Floats d_pre;
  Floats weighted_act;
  Floats d_weights;           // [flat_rows]
  Floats weights;             // [flat_rows]
  IndexArray gather_indices;  // [rows], or null
  SegmentParams segments;
  int rows;
  int flat_rows;  // indices are below it
  int topk;
  int activated;
  int hidden;
  int hidden_strips;  // of d_out and down_bias by 16-byte accesses; 0: none, or element by element
  int group_rows;     // consecutive rows of a block
  int strips;         // in a row
  Activation activation;
  GateColumns columns;
};

/// What a block knows of one of its rows.
struct Row {
  int flat;   // -1: zero in every output
  int token;  // of d_out
  int expert;
  float weight;
};

/// The index of a row, as it was loaded.
__device__ __forceinline__ IndexArray::Fetched fetch_index(const BackwardArguments& a,
                                                           int position) {
  if (a.gather_indices.data) return a.gather_indices.fetch(position);
  return {.low = static_cast<unsigned>(position), .high = 0};
}

/// The parts of a row that do not depend on m_sizes.
__device__ __forceinline__ Row look_up(const BackwardArguments& a, int flat) {
  Row row = {flat, flat / a.topk, 0, 1.0f};
  if (row.flat >= 0 && a.weights.data) row.weight = a.weights.load(row.flat);
  return row;
}

/// The rest of it.
__device__ __forceinline__ void place(const BackwardArguments& a, const int* row_prefix,
                                      int position, Row& row) {
  if (position >= row_prefix[a.segments.experts]) {
    row.flat = -1;
  } else if (a.bias.data || a.down_bias.data) {
    row.expert = expert_of(row_prefix, a.segments.experts, position);
  }
}

/// Where a row starts. In 32 bits a stride is one instruction.
__device__ __forceinline__ std::int64_t start_of(int row, const Floats& matrix) {
  return std::int64_t{row} * static_cast<int>(matrix.stride);
}

/// This lane's part of <d_out[token], down_bias[expert]>, element by element.
__device__ float bias_share(const BackwardArguments& a, const Row& row) {
  const std::int64_t d_out = row.token * a.d_out.stride;
  const std::int64_t bias = row.expert * a.down_bias.stride;
  float sum = 0.0f;
  for (int c = threadIdx.x % 32; c < a.hidden; c += 32) {
    sum = fmaf(a.d_out.load(d_out + c), a.down_bias.load(bias + c), sum);
  }
  return sum;
}

/// A lane's place in its warp's share of the strips of a block's rows: down the rows of one strip,
/// then of the next. What depends on the column is at hand for the next row then, as the bias is.
struct Cursor {
  int row;
  int column;

  __device__ __forceinline__ void advance(int rows) {
    if (++row == rows) {
      row = 0;
      column += kStripColumns;
    }
  }
};

/// <d_out[token], down_bias[expert]> of each strip of 256 columns and each of a block's rows. A
/// warp goes down the rows of a strip, whose experts are the same for the most part: the bias then
/// comes from L1.
template <typename T>
__device__ __forceinline__ void dot_biases(const BackwardArguments& a, const Row* rows, int count,
                                           float* dots) {
  constexpr int kTogether = 3;  // in flight
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tasks = count * a.hidden_strips;
  const int begin = tasks * warp / kWarps, end = tasks * (warp + 1) / kWarps;
  Cursor at = {begin % count, begin / count * kStripColumns + lane * kPackElems};
  for (int task = begin; task < end; task += kTogether) {
    Pack<T> gradients[kTogether] = {}, biases[kTogether] = {};
#pragma unroll
    for (int j = 0; j < kTogether; ++j, at.advance(count)) {
      const Row row = rows[at.row];
      if (task + j < end && row.flat >= 0 && at.column < a.hidden) {
        gradients[j] = load_shared_pack(static_cast<const T*>(a.d_out.data) +
                                        start_of(row.token, a.d_out) + at.column);
        biases[j] = load_shared_pack(static_cast<const T*>(a.down_bias.data) +
                                     start_of(row.expert, a.down_bias) + at.column);
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      float gradient[kPackElems], value[kPackElems], sum = 0.0f;
      unpack(gradients[j], gradient);
      unpack(biases[j], value);
#pragma unroll
      for (int i = 0; i < kPackElems; ++i) {
        sum = fmaf(gradient[i], value[i], sum);
      }
      sum = warp_sum(sum);
      if (lane == 0 && task + j < end) dots[task + j] = sum;
    }
  }
}

template <typename T, GateLayout L>
using Ring = ThreadRing<T, GatePacks<T, L>::kPacks + 1, kThreads, kStages>;

/// The elements of a lane in one part of its strip, from its first column on: makes and stores
/// their gradients and weighted values, and returns `sum` + <d_act, act>.
template <ActivationFunction F, typename T, GateLayout L>
__device__ __forceinline__ float backward_part(const BackwardArguments& a, const Row& row,
                                               int position, int part, int column,
                                               const GatePacks<T, L>& packs,
                                               const GatePacks<T, L>& bias,
                                               const Pack<T>& gradients, float sum) {
  using Packs = GatePacks<T, L>;
  float gate[Packs::kElems] = {}, up[Packs::kElems] = {}, gradient[Packs::kElems] = {};
  if (row.flat >= 0) {
    packs.split(part, gate, up);
    Packs::split_activated(gradients, part, gradient);
    if (a.bias.data) bias.add_to(part, gate, up);
#pragma unroll
    for (int i = 0; i < Packs::kElems; ++i) {
      const Activated value =
          evaluate<F, Packs::kGated>(a.activation, gate[i], Packs::kGated ? up[i] : 0.0f);
      sum = fmaf(gradient[i], value.act, sum);
      const float weighted = row.weight * gradient[i];
      gate[i] = weighted * value.d_gate;
      if constexpr (Packs::kGated) up[i] = weighted * value.d_up;
      gradient[i] = row.weight * value.act;
    }
  }
  Packs::store(a.d_pre.data, a.d_pre.dtype == DType::kFloat32, start_of(position, a.d_pre), column,
               a.activated, gate, up);
  if (a.weighted_act.data) {
    Packs::store_activated(a.weighted_act.data, a.weighted_act.dtype == DType::kFloat32,
                           start_of(position, a.weighted_act), column, gradient);
  }
  return sum;
}

/// The weights' gradients of a block's rows, from the dot products of their strips.
__device__ __forceinline__ void store_d_weights(const BackwardArguments& a, const Row* rows,
                                                int count, const float* dots) {
  const auto dot = [&](int r) {
    float sum = 0.0f;
    for (int strip = 0; strip < a.strips + a.hidden_strips; ++strip) {
      sum += dots[strip * count + r];
    }
    return sum;
  };
  if (!a.down_bias.data || a.hidden_strips > 0) {
    const int r = static_cast<int>(threadIdx.x);
    if (r < count && rows[r].flat >= 0) a.d_weights.store(rows[r].flat, dot(r));
    return;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int r = warp; r < count; r += kWarps) {
    const Row row = rows[r];
    if (row.flat < 0) continue;
    const float share = warp_sum(bias_share(a, row));
    if (lane == 0) a.d_weights.store(row.flat, dot(r) + share);
  }
}

/// Segments that follow one another, and zeros after them. Shared memory: the ring, the rows, the
/// dot products of their strips and of those of their biases, the experts' prefix sums.
template <typename T, GateLayout L>
__global__ void __launch_bounds__(kThreads, least_resident_blocks<T>())
    backward_packs(const BackwardArguments a) {
  using Packs = GatePacks<T, L>;
  constexpr int kGradient = Packs::kPacks;  // d_act's pack in the ring
  extern __shared__ uint4 memory[];
  auto* const rows = reinterpret_cast<Row*>(memory + Ring<T, L>::kBytes / sizeof(uint4));
  auto* const dots = reinterpret_cast<float*>(rows + a.group_rows);
  auto* const row_prefix =
      reinterpret_cast<int*>(dots + a.group_rows * (a.strips + a.hidden_strips));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = static_cast<int>(blockIdx.x) * a.group_rows;
  const int count = min(a.rows - first, a.group_rows);

  // Asked for before the rows, after which they would wait in line.
  const FetchedSizes sizes = fetch_sizes(a.segments.m_sizes, a.segments.experts);
  const int my_row = static_cast<int>(threadIdx.x);
  IndexArray::Fetched my_index;
  if (my_row < count) my_index = fetch_index(a, first + my_row);

  Ring<T, L> ring(memory);
  const int begin = count * a.strips * warp / kWarps;
  const int end = count * a.strips * (warp + 1) / kWarps;
  const Cursor start = {begin % count, Packs::first_column(begin / count)};
  Cursor fetched = start;
  const auto fetch = [&](bool is_mine) {
    if (is_mine) {
      const int row = first + fetched.row;
      Packs::load(ring, static_cast<const T*>(a.pre.data) + start_of(row, a.pre), fetched.column,
                  a.activated);
      Packs::load_activated(ring, kGradient,
                            static_cast<const T*>(a.d_act.data) + start_of(row, a.d_act),
                            fetched.column, a.activated);
      fetched.advance(count);
    }
    ring.commit();
  };
  // Before m_sizes are known: rows past them hold memory, if nothing of meaning.
#pragma unroll
  for (int stage = 0; stage < Ring<T, L>::kStages; ++stage) {
    fetch(begin + stage < end);
  }
  if (my_row < count) rows[my_row] = look_up(a, my_index.below(a.flat_rows));
  share_row_prefix(a.segments.m_sizes, sizes, a.segments.experts, a.rows, row_prefix);
  if (my_row < count) place(a, row_prefix, first + my_row, rows[my_row]);
  __syncthreads();

  // While the first rows are on their way.
  if (a.hidden_strips > 0) dot_biases<T>(a, rows, count, dots + count * a.strips);

  with_function(a.activation.function, [&]<ActivationFunction F>() {
    Cursor at = start;
    for (int task = begin; task < end; ++task, at.advance(count)) {
      const Row row = rows[at.row];
      const int position = first + at.row;
      Packs bias;
      if (a.bias.data && row.flat >= 0) {
        bias = Packs::load_bias(static_cast<const T*>(a.bias.data) + start_of(row.expert, a.bias),
                                at.column, a.activated);
      }
      ring.wait();
      const Packs packs = Packs::read(ring);
      const Pack<T> gradients = Packs::read_activated(ring, kGradient);
      fetch(task + Ring<T, L>::kStages < end);
      float sum = 0.0f;
#pragma unroll
      for (int part = 0; part < Packs::kParts; ++part) {
        const int column = Packs::column_of(part, at.column);
        if (column >= a.activated) break;
        sum = backward_part<F>(a, row, position, part, column, packs, bias, gradients, sum);
      }
      if (a.d_weights.data) {
        sum = warp_sum(sum);
        if (lane == 0) dots[task] = sum;
      }
    }
  });
  if (!a.d_weights.data) return;
  __syncthreads();
  store_d_weights(a, rows, count, dots);
}

/// Where a block's shared memory has what. `places` is for segments anywhere: the rows' rows.
template <typename T, GateLayout L>
struct BackwardShared {
  uint4* ring;
  Row* rows;
  float* dots;
  int* row_prefix;
  int* places;

  __device__ __forceinline__ BackwardShared(const BackwardArguments& a, uint4* memory)
      : ring(memory),
        rows(reinterpret_cast<Row*>(memory + Ring<T, L>::kBytes / sizeof(uint4))),
        dots(reinterpret_cast<float*>(rows + a.group_rows)),
        row_prefix(reinterpret_cast<int*>(dots + a.group_rows * (a.strips + a.hidden_strips))),
        places(row_prefix + a.segments.experts + 1) {}
};

/// Positions [first, first + count) of segments anywhere. Out of line: what the loop around it
/// keeps would take the registers of what it keeps in flight.
template <ActivationFunction F, typename T, GateLayout L>
__device__ __forceinline__ void backward_group(const BackwardArguments& a, uint4* memory, int first,
                                               int count) {
  using Packs = GatePacks<T, L>;
  constexpr int kGradient = Packs::kPacks;  // d_act's pack in the ring
  const BackwardShared<T, L> shared(a, memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (const int r = static_cast<int>(threadIdx.x); r < count) {
    SegmentCursor cursor(a.segments, shared.row_prefix);
    const int place = cursor.row_at(first + r);
    shared.places[r] = place;
    shared.rows[r] = look_up(a, fetch_index(a, place).below(a.flat_rows));
    shared.rows[r].expert = cursor.expert();
  }
  __syncthreads();
  Ring<T, L> ring(shared.ring);
  const int begin = count * a.strips * warp / kWarps;
  const int end = count * a.strips * (warp + 1) / kWarps;
  const Cursor start = {begin % count, Packs::first_column(begin / count)};
  Cursor fetched = start;
  const auto fetch = [&](bool is_mine) {
    if (is_mine) {
      const int place = shared.places[fetched.row];
      Packs::load(ring, static_cast<const T*>(a.pre.data) + start_of(place, a.pre), fetched.column,
                  a.activated);
      Packs::load_activated(ring, kGradient,
                            static_cast<const T*>(a.d_act.data) + start_of(place, a.d_act),
                            fetched.column, a.activated);
      fetched.advance(count);
    }
    ring.commit();
  };
#pragma unroll
  for (int stage = 0; stage < Ring<T, L>::kStages; ++stage) fetch(begin + stage < end);
  if (a.hidden_strips > 0) dot_biases<T>(a, shared.rows, count, shared.dots + count * a.strips);
  Cursor at = start;
  for (int task = begin; task < end; ++task, at.advance(count)) {
    const Row row = shared.rows[at.row];
    Packs bias;
    if (a.bias.data && row.flat >= 0) {
      bias = Packs::load_bias(static_cast<const T*>(a.bias.data) + start_of(row.expert, a.bias),
                              at.column, a.activated);
    }
    ring.wait();
    const Packs packs = Packs::read(ring);
    const Pack<T> gradients = Packs::read_activated(ring, kGradient);
    fetch(task + Ring<T, L>::kStages < end);
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < Packs::kParts; ++part) {
      const int column = Packs::column_of(part, at.column);
      if (column >= a.activated) break;
      sum = backward_part<F>(a, row, shared.places[at.row], part, column, packs, bias, gradients,
                             sum);
    }
    if (a.d_weights.data) {
      sum = warp_sum(sum);
      if (lane == 0) shared.dots[task] = sum;
    }
  }
  __syncthreads();
  if (a.d_weights.data) store_d_weights(a, shared.rows, count, shared.dots);
  __syncthreads();  // all of it may be written again
}

/// Segments anywhere, and nothing outside them. Blocks go on until all positions are done: there
/// may be far fewer than rows.
template <typename T, GateLayout L>
__global__ void __launch_bounds__(kThreads, least_resident_segment_blocks<T>())
    backward_segments(const __grid_constant__ BackwardArguments a) {
  extern __shared__ uint4 memory[];
  int* const row_prefix = BackwardShared<T, L>(a, memory).row_prefix;
  share_row_prefix<true>(a.segments.m_sizes, fetch_sizes(a.segments.m_sizes, a.segments.experts),
                         a.segments.experts, a.segments.row_limit, row_prefix,
                         a.segments.placement);
  const int routed = row_prefix[a.segments.experts];
  with_function(a.activation.function, [&]<ActivationFunction F>() {
#pragma unroll 1
    for (int first = static_cast<int>(blockIdx.x) * a.group_rows; first < routed;
         first += static_cast<int>(gridDim.x) * a.group_rows) {
      backward_group<F, T, L>(a, memory, first, min(routed - first, a.group_rows));
    }
  });
}

/// One element at a time; returns this lane's part of <d_act, act>.
template <ActivationFunction F>
__device__ float backward_row(const BackwardArguments& a, int position, const Row& row) {
  const bool gated = a.activation.gated();
  const std::int64_t d_pre = position * a.d_pre.stride;
  const auto biased = [&](int column) {
    return load_biased(a.pre, a.bias, position, row.expert, column);
  };
  float sum = 0.0f;
  for (int c = threadIdx.x % 32; c < a.activated; c += 32) {
    const float gate = biased(a.columns.gate_at(c));
    const float up = gated ? biased(a.columns.up_at(c)) : 0.0f;
    const Activated value = gated ? evaluate<F, true>(a.activation, gate, up)
                                  : evaluate<F, false>(a.activation, gate, up);
    const float gradient = a.d_act.load(position * a.d_act.stride + c);
    sum = fmaf(gradient, value.act, sum);
    const float weighted = row.weight * gradient;
    a.d_pre.store(d_pre + a.columns.gate_at(c), weighted * value.d_gate);
    if (gated) a.d_pre.store(d_pre + a.columns.up_at(c), weighted * value.d_up);
    if (a.weighted_act.data) {
      a.weighted_act.store(position * a.weighted_act.stride + c, row.weight * value.act);
    }
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    backward_elements(const BackwardArguments a) {
  extern __shared__ int row_prefix[];
  share_row_prefix<true>(a.segments.m_sizes, fetch_sizes(a.segments.m_sizes, a.segments.experts),
                         a.segments.experts, a.segments.row_limit, row_prefix,
                         a.segments.placement);
  const int routed = row_prefix[a.segments.experts];
  const int step = static_cast<int>(gridDim.x) * kWarps;
  SegmentCursor cursor(a.segments, row_prefix);
  for (int position = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32); position < routed;
       position += step) {
    const int r = cursor.row_at(position);
    Row row = look_up(a, fetch_index(a, r).below(a.flat_rows));
    row.expert = cursor.expert();
    if (row.flat < 0) {
      a.d_pre.zero_row(r, a.activation.gated() ? 2 * a.activated : a.activated);
      a.weighted_act.zero_row(r, a.activated);
      continue;
    }
    float sum = 0.0f;
    with_function(a.activation.function,
                  [&]<ActivationFunction F>() { sum = backward_row<F>(a, r, row); });
    if (!a.d_weights.data) continue;
    if (a.down_bias.data) sum += bias_share(a, row);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) a.d_weights.store(row.flat, sum);
  }
}

}  // namespace
}  // namespace moegemm::cuda
