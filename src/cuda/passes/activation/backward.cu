#include <algorithm>
#include <cstdint>

#include "cuda/backend/device_facts.h"
#include "cuda/backend/error.h"
#include "cuda/backend/launch/launch.h"
#include "cuda/backend/launch/loading.h"
#include "cuda/backend/launch/segment_params.h"
#include "cuda/passes/activation/backward_rows.cuh"
#include "cuda/passes/activation/kernel_choice.h"
#include "cuda/passes/activation/limits.h"
#include "cuda/passes/alignment.h"
#include "cuda/passes/passes.h"

/// The gradient of an activation, its weighted value and the gradient of the weight, in one pass. A
/// block has a few consecutive rows, whose strips of 256 columns its warps share. Dot products are
/// added in a fixed order: lanes in a tree, then strips. What is not 16-byte aligned goes element
/// by element, one warp per row. An element is read before it is written, by the same warp:
/// weighted_act may be d_act.
namespace moegemm::cuda {
namespace {

using namespace activation_gradient;

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

/// Where a block's shared memory has what, for segments anywhere: `places` are the rows' rows.
template <typename T, GateLayout L>
struct BackwardShared {
  uint4* ring;
  Row* rows;
  float* dots;
  int* row_prefix;
  int* shifts;  // of the experts
  int* places;

  __device__ __forceinline__ BackwardShared(const BackwardArguments& a, uint4* memory)
      : ring(memory),
        rows(reinterpret_cast<Row*>(memory + Ring<T, L>::kBytes / sizeof(uint4))),
        dots(reinterpret_cast<float*>(rows + a.group_rows)),
        row_prefix(reinterpret_cast<int*>(dots + a.group_rows * (a.strips + a.hidden_strips))),
        shifts(row_prefix + a.segments.experts + 1),
        places(shifts + a.segments.experts) {}
};

/// Positions [first, first + count) of segments anywhere. Its loop is that of backward_packs,
/// written again: as one function for both, two of these kernels spill registers.
template <ActivationFunction F, typename T, GateLayout L>
__device__ __forceinline__ void backward_group(const BackwardArguments& a, uint4* memory, int first,
                                               int count) {
  using Packs = GatePacks<T, L>;
  constexpr int kGradient = Packs::kPacks;  // d_act's pack in the ring
  const BackwardShared<T, L> shared(a, memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (const int r = static_cast<int>(threadIdx.x); r < count) {
    const int expert = expert_of(shared.row_prefix, a.segments.experts, first + r);
    const int place = first + r + shared.shifts[expert];
    shared.places[r] = place;
    shared.rows[r] = look_up(a, fetch_index(a, place).below(a.flat_rows));
    shared.rows[r].expert = expert;
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
  const BackwardShared<T, L> shared(a, memory);
  const int routed = share_positions(a.segments, shared.row_prefix, shared.shifts);
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
  const int routed = share_positions(a.segments, row_prefix);
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

struct PackedKernel {
  template <typename T, GateLayout L>
  const void* operator()() const {
    return reinterpret_cast<const void*>(&backward_packs<T, L>);
  }
};

struct SegmentKernel {
  template <typename T, GateLayout L>
  const void* operator()() const {
    return reinterpret_cast<const void*>(&backward_segments<T, L>);
  }
};

const ListedKernels listed([] { return for_16_bit_layouts(PackedKernel()); });
const ListedKernels listed_segments([] { return for_16_bit_layouts(SegmentKernel()); });

/// Rows can be moved by 16-byte accesses, and counted as start_of does.
bool is_packed(const TensorView& view) {
  return is_16_byte_aligned(view) && view.row_stride <= INT32_MAX;
}
bool packed_if_given(const TensorView& view) { return !view.given() || is_packed(view); }

/// Rows of a block: as many as have kStripsOfBlock, and no more than leave every multiprocessor
/// some.
std::int64_t rows_of_block(std::int64_t rows, std::int64_t strips, std::int64_t resident_blocks) {
  const std::int64_t most =
      std::min<std::int64_t>(kMostRows, (rows + resident_blocks - 1) / resident_blocks);
  return std::clamp<std::int64_t>(kStripsOfBlock / strips, 1, most);
}
/// The same where blocks stay: as many as end together.
std::int64_t rows_of_turn(std::int64_t rows, std::int64_t strips, std::int64_t resident_blocks) {
  const std::int64_t most = std::clamp<std::int64_t>(kStripsOfBlock / strips, 1, kMostRows);
  const std::int64_t turns = (rows + most * resident_blocks - 1) / (most * resident_blocks);
  return (rows + turns * resident_blocks - 1) / (turns * resident_blocks);
}

/// How a launch cuts its rows.
struct BackwardShape {
  bool packed;            ///< by 16-byte accesses
  bool simple;            ///< segments that follow one another, and zeros after them
  std::int64_t planned;   ///< rows that blocks are made for
  std::int64_t resident;  ///< blocks on the GPU at one time
  std::int64_t strips;    ///< of a row
  std::int64_t hidden_strips;
  std::int64_t group;  ///< rows of a block at a time
  int shared_bytes;
};

BackwardShape shape_of(const ActivationGradientInputs& in, const RoutingView& routing,
                       const Activation& activation, const ActivationGradientOutputs& out) {
  const std::int64_t rows = in.pre.shape[0], activated = in.d_act.shape[1];
  const std::int64_t hidden = in.d_out.given() ? in.d_out.shape[1] : 0;
  const int multiprocessors = device_facts(in.pre.device.index)->multiprocessors;
  BackwardShape shape = {};
  shape.strips = (activated + kStripColumns - 1) / kStripColumns;
  shape.packed = activated % kPackElems == 0 && in.d_act.dtype == in.pre.dtype &&
                 is_packed(in.pre) && is_packed(in.d_act) && packed_if_given(in.bias) &&
                 is_packed(out.d_pre) && packed_if_given(out.weighted_act) && shape.strips > 0 &&
                 shape.strips <= kMostStrips;
  shape.simple = shape.packed && is_packed_with_zeros(routing);
  shape.resident = (kBlocksPerMultiprocessor - (shape.packed && !shape.simple)) * multiprocessors;
  shape.planned = std::max<std::int64_t>(planned_rows(routing, rows), 1);
  shape.group = !shape.packed  ? 1
                : shape.simple ? rows_of_block(rows, shape.strips, shape.resident)
                               : rows_of_turn(shape.planned, shape.strips, shape.resident);
  const std::int64_t hidden_strips = (hidden + kStripColumns - 1) / kStripColumns;
  const bool packed_hidden = shape.packed && hidden % kPackElems == 0 &&
                             packed_if_given(in.d_out) && packed_if_given(in.down_bias) &&
                             hidden_strips <= kMostStrips;
  shape.hidden_strips = packed_hidden ? hidden_strips : 0;
  const std::int64_t dots = shape.strips + shape.hidden_strips;
  const std::int64_t of_row = sizeof(Row) + dots * sizeof(float);
  if (shape.packed) {
    shape.shared_bytes =
        ring_bytes(kStages, size_bytes(in.pre.dtype), activation.gated() ? 3 : 2, kThreads) +
        static_cast<int>(shape.group * of_row);
  }
  if (shape.packed && !shape.simple) {  // shifts and places
    shape.shared_bytes += static_cast<int>((routing.m_sizes.shape[0] + shape.group) * 4);
  }
  return shape;
}

void clear(const TensorView& d_weights, std::int64_t count, cudaStream_t stream) {
  if (!d_weights.given()) return;  // all zero bits are zero in every floating dtype
  check(cudaMemsetAsync(d_weights.data, 0,
                        static_cast<std::size_t>(count * size_bytes(d_weights.dtype)), stream),
        "clear d_weights for activate_backward");
}

}  // namespace

void CudaPasses::activate_backward(const ActivationGradientInputs& in, const RoutingView& routing,
                                   const Activation& activation,
                                   const ActivationGradientOutputs& out,
                                   const ExecutionContext& context) const {
  const PassLaunch on(in.pre.device, context);
  const std::int64_t rows = in.pre.shape[0], activated = in.d_act.shape[1];
  const std::int64_t flat_rows = flat_rows_of(routing, out, rows);
  if (rows == 0) return clear(out.d_weights, flat_rows, on.stream);
  const std::int64_t experts = routing.m_sizes.shape[0];
  const std::int64_t hidden = in.d_out.given() ? in.d_out.shape[1] : 0;
  const BackwardShape shape = shape_of(in, routing, activation, out);
  require_activation_limits(std::max(rows, flat_rows), std::max(in.pre.shape[1], hidden), experts,
                            shape.shared_bytes, in.pre.device);
  clear(out.d_weights, flat_rows, on.stream);
  BackwardArguments arguments = {
      .pre = floats_of(in.pre),
      .bias = floats_of(in.bias),
      .d_act = floats_of(in.d_act),
      .d_out = floats_of(in.d_out),
      .down_bias = floats_of(in.down_bias),
      .d_pre = floats_of(out.d_pre),
      .weighted_act = floats_of(out.weighted_act),
      .d_weights = floats_of(out.d_weights),
      .weights = floats_of(routing.router_weights),
      .gather_indices = indices_of(routing.gather_indices),
      .segments = segment_params(routing, rows, rows),
      .rows = static_cast<int>(rows),
      .flat_rows = static_cast<int>(flat_rows),
      .topk = static_cast<int>(routing.topk),
      .activated = static_cast<int>(activated),
      .hidden = static_cast<int>(hidden),
      .hidden_strips = static_cast<int>(shape.hidden_strips),
      .group_rows = static_cast<int>(shape.group),
      .strips = static_cast<int>(shape.strips),
      .activation = activation,
      .columns = gate_columns(activation, activated),
  };
  void* parameters[] = {&arguments};
  const auto blocks_for = [&](std::int64_t count) {
    return dim3(static_cast<unsigned>((count + shape.group - 1) / shape.group));
  };
  const int shared_bytes = shape.shared_bytes + row_prefix_bytes(experts);
  if (shape.simple) {
    launch({for_dtype_and_layout(in.pre.dtype, activation.layout, PackedKernel()),
            "activate_backward (packs)", blocks_for(rows), dim3(kThreads), shared_bytes},
           parameters, on.stream);
    return;
  }
  if (routing.tails == Tails::kZero) {
    zero_gaps(out.d_pre, routing, context);
    if (out.weighted_act.given()) zero_gaps(out.weighted_act, routing, context);
  }
  if (!shape.packed) {
    const std::int64_t blocks = std::min((shape.planned + kWarps - 1) / kWarps, shape.resident);
    launch({reinterpret_cast<const void*>(&backward_elements), "activate_backward (elements)",
            dim3(static_cast<unsigned>(blocks)), dim3(kThreads), shared_bytes},
           parameters, on.stream);
    return;
  }
  const std::int64_t turns = (shape.planned + shape.group - 1) / shape.group;
  launch(
      {for_dtype_and_layout(in.pre.dtype, activation.layout, SegmentKernel()),
       "activate_backward (segments)", dim3(static_cast<unsigned>(std::min(turns, shape.resident))),
       dim3(kThreads), shared_bytes},
      parameters, on.stream);
}

}  // namespace moegemm::cuda
