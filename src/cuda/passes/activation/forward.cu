#include <algorithm>
#include <cstdint>

#include "cuda/backend/device_facts.h"
#include "cuda/backend/launch/launch.h"
#include "cuda/backend/launch/loading.h"
#include "cuda/backend/launch/segment_params.h"
#include "cuda/device/activation_math.cuh"
#include "cuda/device/fast_divide.h"
#include "cuda/passes/activation/gate_packs.cuh"
#include "cuda/passes/activation/kernel_choice.h"
#include "cuda/passes/activation/limits.h"
#include "cuda/passes/activation/row_experts.cuh"
#include "cuda/passes/alignment.h"
#include "cuda/passes/passes.h"
#include "cuda/passes/thread_ring.cuh"

/// act = activation(pre + bias). A warp takes a strip of 256 columns of some consecutive rows: its
/// lanes keep their columns, so that a row costs no index arithmetic, and an expert's bias is
/// loaded once for all of its rows. What is not 16-byte aligned goes element by element.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerMultiprocessor = 4;
/// 128 bytes in flight for each of 1024 threads on a multiprocessor: more than four times what
/// hides the latency of HBM (4.2 TB/s * 0.9 us over 132 of them: 29 KB each), so that warps may
/// compute.
constexpr int kStages = 4;
/// Blocks come in this many waves, the last of them nearly full: a few blocks more than whole waves
/// would run alone at the end.
constexpr int kWaves = 6;
/// Or in more, where a warp would have more rows than this: with few, what all blocks work on at
/// one time lies close together. A bias is loaded for all of a warp's rows.
constexpr int most_rows(bool bias) { return bias ? 12 : 4; }

struct ActivateArguments {
  Floats pre;   // [rows, C]
  Floats bias;  // [experts, C]
  Floats act;   // [rows, activated]
  SegmentParams segments;
  int rows;
  int activated;
  int strips;             // in a row
  FastDivisor by_strips;  // tasks of warps: strips of groups of rows
  int group_rows;
  int groups;
  Activation activation;
  GateColumns columns;
  Floats weights;  // [rows]
};

template <typename T, GateLayout L>
using Ring = ThreadRing<T, GatePacks<T, L>::kPacks, kThreads, kStages>;

/// The bias of a lane's columns, for the expert of the row it was last asked for. Kept as it is in
/// memory, in half the registers.
template <typename T, GateLayout L>
struct LaneBias {
  GatePacks<T, L> bias;
  int end = 0;  // of the expert's rows

  __device__ __forceinline__ void move_to(const ActivateArguments& a, const int* row_prefix,
                                          int row, int column) {
    if (row < end) return;
    const int expert = expert_of(row_prefix, a.segments.experts, row);
    end = row_prefix[expert + 1];
    bias = GatePacks<T, L>::load_bias(static_cast<const T*>(a.bias.data) + expert * a.bias.stride,
                                      column, a.activated);
  }
};

/// A part of a lane's elements of a row.
template <ActivationFunction F, typename T, GateLayout L>
__device__ __forceinline__ void activate_part(const ActivateArguments& a,
                                              const GatePacks<T, L>& packs,
                                              const GatePacks<T, L>& bias, int part,
                                              float (&act)[GatePacks<T, L>::kElems]) {
  using Packs = GatePacks<T, L>;
  float gate[Packs::kElems], up[Packs::kElems];
  packs.split(part, gate, up);
  if (a.bias.data) bias.add_to(part, gate, up);
#pragma unroll
  for (int i = 0; i < Packs::kElems; ++i) {
    act[i] = evaluate<F, Packs::kGated>(a.activation, gate[i], Packs::kGated ? up[i] : 0.0f).act;
  }
}

/// Segments that follow one another, and zeros after them: rows are asked for before it is known
/// where the segments end.
template <typename T, GateLayout L>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    activate_packs(const ActivateArguments a) {
  using Packs = GatePacks<T, L>;
  extern __shared__ uint4 memory[];
  auto* const row_prefix = reinterpret_cast<int*>(memory) + Ring<T, L>::kBytes / sizeof(int);
  const int task = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  const int group = static_cast<int>(a.by_strips.divide(static_cast<unsigned>(task)));
  const int column = Packs::first_column(task - group * a.strips);
  const int first = min(group * a.group_rows, a.rows);
  const int end = min(first + a.group_rows, a.rows);

  // Asked for before the rows, after which it would wait in line.
  const FetchedSizes sizes = fetch_sizes(a.segments.m_sizes, a.segments.experts);
  Ring<T, L> ring(memory);
  const T* source = static_cast<const T*>(a.pre.data) + first * a.pre.stride;
  int fetched = first;
  const auto fetch = [&] {
    if (fetched < end) {
      Packs::load(ring, source, column, a.activated);
      source += a.pre.stride;
      ++fetched;
    }
    ring.commit();
  };
  // Before m_sizes are known: rows past them hold memory, if nothing of meaning.
#pragma unroll
  for (int stage = 0; stage < Ring<T, L>::kStages; ++stage) {
    fetch();
  }
  share_row_prefix(a.segments.m_sizes, sizes, a.segments.experts, a.rows, row_prefix);
  const int routed = row_prefix[a.segments.experts];
  if (column >= a.activated) return;

  with_function(a.activation.function, [&]<ActivationFunction F>() {
    LaneBias<T, L> bias;
    const bool fp32 = a.act.dtype == DType::kFloat32;
    std::int64_t target = first * a.act.stride;
    for (int row = first; row < end; ++row, target += a.act.stride) {
      ring.wait();
      const Packs packs = Packs::read(ring);
      fetch();
      if (a.bias.data && row < routed) bias.move_to(a, row_prefix, row, column);
#pragma unroll
      for (int part = 0; part < Packs::kParts; ++part) {
        const int c = Packs::column_of(part, column);
        if (c >= a.activated) break;
        float act[Packs::kElems] = {};
        if (row < routed) activate_part<F>(a, packs, bias.bias, part, act);
        Packs::store_activated(a.act.data, fp32, target, c, act);
      }
    }
  });
}

/// Segments anywhere, rows that are weighted, and nothing outside the segments. Blocks go on until
/// all positions are done: there may be far fewer than rows.
template <typename T, GateLayout L>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? kBlocksPerMultiprocessor : 3)
    activate_segments(const ActivateArguments a) {
  using Packs = GatePacks<T, L>;
  extern __shared__ uint4 memory[];
  auto* const row_prefix = reinterpret_cast<int*>(memory) + Ring<T, L>::kBytes / sizeof(int);
  const int routed = share_positions(a.segments, row_prefix);
  Ring<T, L> ring(memory);
  const bool fp32 = a.act.dtype == DType::kFloat32;
  with_function(a.activation.function, [&]<ActivationFunction F>() {
    for (unsigned task = blockIdx.x * kWarps + threadIdx.x / 32;; task += gridDim.x * kWarps) {
      const int group = static_cast<int>(a.by_strips.divide(task));
      if (group >= a.groups || group * a.group_rows >= routed) return;
      const int column = Packs::first_column(static_cast<int>(task) - group * a.strips);
      const int first = group * a.group_rows;
      const int end = min(first + a.group_rows, routed);
      SegmentCursor ahead(a.segments, row_prefix), at(a.segments, row_prefix);
      int fetched = first;
      const auto fetch = [&] {
        if (fetched < end) {
          Packs::load(ring,
                      static_cast<const T*>(a.pre.data) + ahead.row_at(fetched) * a.pre.stride,
                      column, a.activated);
          ++fetched;
        }
        ring.commit();
      };
#pragma unroll
      for (int stage = 0; stage < Ring<T, L>::kStages; ++stage) fetch();
      LaneBias<T, L> bias;
      for (int position = first; position < end; ++position) {
        ring.wait();
        const Packs packs = Packs::read(ring);
        fetch();
        if (column >= a.activated) continue;
        const int row = at.row_at(position);
        const float weight = a.weights.data ? a.weights.load(row) : 1.0f;
        if (a.bias.data) bias.move_to(a, row_prefix, position, column);
#pragma unroll
        for (int part = 0; part < Packs::kParts; ++part) {
          const int c = Packs::column_of(part, column);
          if (c >= a.activated) break;
          float act[Packs::kElems];
          activate_part<F>(a, packs, bias.bias, part, act);
#pragma unroll
          for (float& value : act) value *= weight;
          Packs::store_activated(a.act.data, fp32, row * a.act.stride, c, act);
        }
      }
    }
  });
}

/// Element by element, of any dtype, segment and weight; nothing outside the segments.
__global__ void __launch_bounds__(kThreads) activate_elements(const ActivateArguments a) {
  extern __shared__ int row_prefix[];
  const std::int64_t routed = share_positions(a.segments, row_prefix);
  const bool gated = a.activation.gated();
  const std::int64_t elements = routed * a.activated;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  SegmentCursor at(a.segments, row_prefix);
  for (std::int64_t i =
           static_cast<std::int64_t>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
       i < elements; i += step) {
    const int row = at.row_at(static_cast<int>(i / a.activated));
    const int column = static_cast<int>(i % a.activated);
    const float gate = load_biased(a.pre, a.bias, row, at.expert(), a.columns.gate_at(column));
    const float up =
        gated ? load_biased(a.pre, a.bias, row, at.expert(), a.columns.up_at(column)) : 0.0f;
    float act = 0.0f;
    with_function(a.activation.function, [&]<ActivationFunction F>() {
      act = gated ? evaluate<F, true>(a.activation, gate, up).act
                  : evaluate<F, false>(a.activation, gate, up).act;
    });
    if (a.weights.data) act *= a.weights.load(row);
    a.act.store(row * a.act.stride + column, act);
  }
}

/// Rows of a warp's strip, where all warps together have so many strips of rows.
std::int64_t rows_of_warp(std::int64_t strips, std::int64_t resident_warps, bool bias) {
  const std::int64_t warps = resident_warps * kWaves;
  return std::clamp<std::int64_t>((strips + warps - 1) / warps, 1, most_rows(bias));
}
/// The same where warps stay: as many as end together.
std::int64_t rows_of_turn(std::int64_t strips, std::int64_t resident_warps) {
  const std::int64_t most = most_rows(true) * resident_warps;
  const std::int64_t turns = std::max<std::int64_t>((strips + most - 1) / most, 1);
  const std::int64_t warps = turns * resident_warps;
  return std::max<std::int64_t>((strips + warps - 1) / warps, 1);
}

struct PackedKernel {
  template <typename T, GateLayout L>
  const void* operator()() const {
    return reinterpret_cast<const void*>(&activate_packs<T, L>);
  }
};
struct SegmentKernel {
  template <typename T, GateLayout L>
  const void* operator()() const {
    return reinterpret_cast<const void*>(&activate_segments<T, L>);
  }
};

const ListedKernels listed([] { return for_16_bit_layouts(PackedKernel()); });
const ListedKernels listed_segments([] { return for_16_bit_layouts(SegmentKernel()); });

}  // namespace

void CudaPasses::activate(const TensorView& pre, const TensorView& bias, const RoutingView& routing,
                          const Activation& activation, const TensorView& act,
                          const ExecutionContext& context) const {
  const PassLaunch on(pre.device, context);
  const std::int64_t rows = act.shape[0], activated = act.shape[1];
  if (rows == 0 || activated == 0) {
    return;
  }
  const std::int64_t experts = routing.m_sizes.shape[0];
  const std::int64_t planned = planned_rows(routing, rows);
  const std::int64_t resident =
      kBlocksPerMultiprocessor * device_facts(pre.device.index)->multiprocessors;
  const std::int64_t strips = (activated + kStripColumns - 1) / kStripColumns;
  const bool simple = is_packed_with_zeros(routing) && !routing.router_weights.given();
  const std::int64_t group = simple ? rows_of_warp(rows * strips, resident * kWarps, bias.given())
                                    : rows_of_turn(planned * strips, resident * kWarps);
  const std::int64_t tasks = (rows + group - 1) / group * strips;
  const bool packed = activated % kPackElems == 0 && is_16_byte_aligned(pre) &&
                      is_16_byte_aligned(act) && (!bias.given() || is_16_byte_aligned(bias)) &&
                      tasks < (std::int64_t{1} << 31) - kWarps;
  const int shared_bytes =
      packed ? ring_bytes(kStages, size_bytes(pre.dtype), activation.gated() ? 2 : 1, kThreads) : 0;
  require_activation_limits(rows, pre.shape[1], experts, shared_bytes, pre.device);
  ActivateArguments arguments = {
      .pre = floats_of(pre),
      .bias = floats_of(bias),
      .act = floats_of(act),
      .segments = segment_params(routing, rows, rows),
      .rows = static_cast<int>(rows),
      .activated = static_cast<int>(activated),
      .strips = static_cast<int>(strips),
      .by_strips = make_fast_divisor(static_cast<std::uint32_t>(strips)),
      .group_rows = static_cast<int>(group),
      .groups = static_cast<int>((rows + group - 1) / group),
      .activation = activation,
      .columns = gate_columns(activation, activated),
      .weights = floats_of(routing.router_weights),
  };
  void* parameters[] = {&arguments};
  if (packed && simple) {
    launch({for_dtype_and_layout(pre.dtype, activation.layout, PackedKernel()), "activate_packs",
            dim3(static_cast<unsigned>((tasks + kWarps - 1) / kWarps)), dim3(kThreads),
            shared_bytes + row_prefix_bytes(experts)},
           parameters, on.stream);
    return;
  }
  if (routing.tails == Tails::kZero) zero_gaps(act, routing, context);
  if (!packed) {
    const std::int64_t blocks = std::min((planned * activated + kThreads - 1) / kThreads, resident);
    launch({reinterpret_cast<const void*>(&activate_elements), "activate_elements",
            dim3(static_cast<unsigned>(std::max<std::int64_t>(blocks, 1))), dim3(kThreads),
            row_prefix_bytes(experts)},
           parameters, on.stream);
    return;
  }
  const std::int64_t blocks =
      std::min(((planned + group - 1) / group * strips + kWarps - 1) / kWarps, resident);
  launch({for_dtype_and_layout(pre.dtype, activation.layout, SegmentKernel()), "activate_segments",
          dim3(static_cast<unsigned>(std::max<std::int64_t>(blocks, 1))), dim3(kThreads),
          shared_bytes + row_prefix_bytes(experts)},
         parameters, on.stream);
}

}  // namespace moegemm::cuda
