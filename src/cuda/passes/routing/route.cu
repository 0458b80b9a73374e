#include <string>

#include "cuda/backend/launch/launch.h"
#include "cuda/backend/launch/loading.h"
#include "cuda/passes/block_sums.cuh"
#include "cuda/passes/early_start.cuh"
#include "cuda/passes/elements.cuh"
#include "cuda/passes/passes.h"
#include "cuda/passes/routing/route_plan.h"
#include "cuda/ptx/griddepcontrol.cuh"
#include "moegemm/error.h"

/// A counting sort in two kernels, stable and without atomics on anything that orders rows.
///
///   count_rows   block b counts the buckets of its chunk                -> counts[b][bucket]
///   place_rows   block b adds up the counts of all blocks and of those before it, scans the
///                buckets, and gives each of its warps, which own consecutive runs of the chunk,
///                the position of its first row of each bucket; a warp then walks its run in order
///
/// place_rows starts early: its warps count their runs while count_rows still runs.
///
/// Few rows need one block, which counts for itself: one launch. Very few need no counters: a row's
/// position is the number of rows that come before it (place_few_rows).
///
/// Compact: the last bucket gets no positions, and those past the capacity are dropped.
namespace moegemm::cuda {
namespace {

struct RouteArguments {
  const void* expert_ids;  // [T, topk]
  bool ids_64_bit;
  bool ids_dense;
  unsigned topk;
  std::int64_t ids_stride;
  unsigned rows;     // M
  unsigned buckets;  // E + 1
  unsigned chunk_rows;
  unsigned blocks;
  unsigned ranking_warps;
  unsigned* counts;      // [blocks, buckets]; null with one block
  unsigned* counters;    // [blocks, ranking_warps + 2, buckets], unless in shared memory
  void* m_sizes;         // [E]
  void* gather_indices;  // [M]
  void* inverse;         // [M] or null
  bool outputs_64_bit;

  // Compact only.
  std::int64_t capacity;   // length of gather_indices
  const void* num_tokens;  // or null
  bool num_tokens_64_bit;
  void* overflow;  // or null
  bool overflow_64_bit;
};

/// Flat rows whose ids count.
template <bool Compact>
__device__ __forceinline__ unsigned counted_rows(const RouteArguments& a) {
  if (!Compact || !a.num_tokens) return a.rows;
  const std::int64_t tokens = load_index(a.num_tokens, a.num_tokens_64_bit, 0);
  const std::int64_t all = a.rows / a.topk;
  return static_cast<unsigned>(min(max(tokens, std::int64_t{0}), all)) * a.topk;
}

/// The bucket of flat row i: its expert, or the last bucket for an id that names none and for rows
/// that do not count.
template <bool Compact>
__device__ unsigned bucket_of(const RouteArguments& a, unsigned i, unsigned counted) {
  if (Compact && i >= counted) return a.buckets - 1;
  const std::int64_t offset = a.ids_dense ? i : i / a.topk * a.ids_stride + i % a.topk;
  const auto id = static_cast<std::uint64_t>(load_index(a.expert_ids, a.ids_64_bit, offset));
  const unsigned experts = a.buckets - 1;
  return id < experts ? static_cast<unsigned>(id) : experts;
}

/// InShared: the block's counters are in shared memory, else in the workspace. A template
/// parameter, because atomics are only fast where the compiler knows the kind of memory.
template <bool InShared, bool Compact>
__global__ void __launch_bounds__(kRouteThreads, 1) count_rows(const RouteArguments a) {
  ptx::griddepcontrol_launch_dependents();  // began after all before it had ended
  const unsigned counted = counted_rows<Compact>(a);
  extern __shared__ unsigned shared[];
  unsigned* const counts = a.counts + static_cast<std::size_t>(blockIdx.x) * a.buckets;
  unsigned* const histogram = InShared ? shared : counts;
  for (unsigned b = threadIdx.x; b < a.buckets; b += kRouteThreads) {
    histogram[b] = 0;
  }
  __syncthreads();
  const unsigned first = blockIdx.x * a.chunk_rows;
  const unsigned last = min(first + a.chunk_rows, a.rows);
  for (unsigned i = first + threadIdx.x; i < last; i += kRouteThreads) {
    atomicAdd(&histogram[bucket_of<Compact>(a, i, counted)], 1u);
  }
  if constexpr (InShared) {
    __syncthreads();
    for (unsigned b = threadIdx.x; b < a.buckets; b += kRouteThreads) {
      counts[b] = histogram[b];
    }
  }
}

/// totals[bucket] = rows of all blocks, before[bucket] = rows of the blocks before this one. Both
/// are zero when it starts.
__device__ void add_up_counts(const RouteArguments& a, unsigned* totals, unsigned* before) {
  constexpr int kInFlight = 8;
  const std::size_t count = static_cast<std::size_t>(a.blocks) * a.buckets;
  unsigned bucket = threadIdx.x % a.buckets;
  unsigned block = threadIdx.x / a.buckets;
  const unsigned bucket_step = kRouteThreads % a.buckets;
  const unsigned block_step = kRouteThreads / a.buckets;
  for (std::size_t i = threadIdx.x; i < count; i += kInFlight * kRouteThreads) {
    unsigned loaded[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const std::size_t at = i + j * kRouteThreads;
      loaded[j] = at < count ? a.counts[at] : 0;
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (loaded[j] != 0) {
        atomicAdd(&totals[bucket], loaded[j]);
        if (block < blockIdx.x) {
          atomicAdd(&before[bucket], loaded[j]);
        }
      }
      bucket += bucket_step;
      block += block_step;
      if (bucket >= a.buckets) {
        bucket -= a.buckets;
        ++block;
      }
    }
  }
}

/// What a bucket that starts at `position` has room for. The last bucket starts where all rows of
/// experts end: `routed` is told.
__device__ __forceinline__ unsigned kept_rows(const RouteArguments& a, unsigned bucket,
                                              unsigned position, unsigned size, unsigned* routed) {
  if (bucket + 1 == a.buckets) {
    *routed = position;
    if (position > a.capacity && a.overflow && blockIdx.x == 0) {
      store_index(a.overflow, a.overflow_64_bit, 0, 1);
    }
  }
  const std::int64_t room = max(a.capacity - position, std::int64_t{0});
  return static_cast<unsigned>(min(static_cast<std::int64_t>(size), room));
}

/// Turns the warps' counts into the position of each warp's first row of each bucket, and writes
/// m_sizes. Compact: `routed` becomes the rows of all experts.
template <bool Compact>
__device__ void counts_to_positions(const RouteArguments& a, const unsigned* totals,
                                    const unsigned* before, unsigned* warp_counters,
                                    unsigned* routed) {
  __shared__ unsigned warp_sums[32];
  unsigned start_of_chunk = 0;
  for (unsigned first = 0; first < a.buckets; first += kRouteThreads) {
    const unsigned bucket = first + threadIdx.x;
    unsigned size = 0;
    if (bucket < a.buckets) {
      if (a.counts) {
        size = totals[bucket];
      } else {
#pragma unroll 8
        for (unsigned w = 0; w < a.ranking_warps; ++w) {
          size += warp_counters[w * a.buckets + bucket];
        }
      }
    }
    unsigned chunk_size = 0;
    unsigned position = start_of_chunk + block_exclusive_sum(size, warp_sums, chunk_size);
    start_of_chunk += chunk_size;
    if (bucket < a.buckets) {
      const unsigned kept = Compact ? kept_rows(a, bucket, position, size, routed) : size;
      if (blockIdx.x == 0 && bucket + 1 < a.buckets) {
        store_index(a.m_sizes, a.outputs_64_bit, bucket, kept);
      }
      position += before[bucket];
      constexpr unsigned kBatch = 8;  // loads before stores: one shared-memory latency for eight
      for (unsigned first_warp = 0; first_warp < a.ranking_warps; first_warp += kBatch) {
        unsigned* const counter = warp_counters + first_warp * a.buckets + bucket;
        const unsigned warps = a.ranking_warps - first_warp;
        unsigned rows[kBatch];
#pragma unroll
        for (unsigned j = 0; j < kBatch; ++j) {
          rows[j] = j < warps ? counter[j * a.buckets] : 0;
        }
#pragma unroll
        for (unsigned j = 0; j < kBatch; ++j) {
          if (j < warps) {
            counter[j * a.buckets] = position;
          }
          position += rows[j];
        }
      }
    }
  }
}

/// Places rows [first, last), 32 at a time; `next[bucket]` is where this warp's next row of the
/// bucket goes, `ahead` the bucket of this lane's first row.
template <bool Compact>
__device__ void place_run(const RouteArguments& a, unsigned first, unsigned last, unsigned* next,
                          unsigned counted, unsigned ahead) {
  const unsigned lane = threadIdx.x % 32;
  for (unsigned base = first; base < last; base += 32) {
    const unsigned i = base + lane;
    const bool present = i < last;
    const unsigned bucket = ahead;  // lanes without a row agree on a bucket that is none
    ahead = i + 32 < last ? bucket_of<Compact>(a, i + 32, counted) : a.buckets;
    const unsigned peers = __match_any_sync(kFullMask, bucket);
    const unsigned rank = __popc(peers & ((1u << lane) - 1));
    const unsigned position = present ? next[bucket] + rank : 0;
    __syncwarp();
    if (present && rank == 0) {
      next[bucket] = position + __popc(peers);
    }
    __syncwarp();
    if constexpr (Compact) {
      const bool kept = present && bucket + 1 < a.buckets && position < a.capacity;
      if (kept) store_index(a.gather_indices, a.outputs_64_bit, position, i);
      if (present) store_index(a.inverse, a.outputs_64_bit, i, kept ? std::int64_t{position} : -1);
    } else if (present) {
      store_index(a.gather_indices, a.outputs_64_bit, position, i);
      if (a.inverse) {
        store_index(a.inverse, a.outputs_64_bit, i, position);
      }
    }
  }
}

/// What no row has of gather_indices, by all blocks.
__device__ void mark_tail(const RouteArguments& a, unsigned routed) {
  const std::int64_t step = std::int64_t{gridDim.x} * kRouteThreads;
  for (std::int64_t i = routed + std::int64_t{blockIdx.x} * kRouteThreads + threadIdx.x;
       i < a.capacity; i += step) {
    store_index(a.gather_indices, a.outputs_64_bit, i, -1);
  }
}

template <bool InShared, bool Compact>
__global__ void __launch_bounds__(kRouteThreads, 1) place_rows(const RouteArguments a) {
  extern __shared__ unsigned shared[];
  __shared__ unsigned routed;
  const unsigned counted = counted_rows<Compact>(a);
  const unsigned counters = (a.ranking_warps + 2) * a.buckets;
  unsigned* const totals =
      InShared ? shared : a.counters + static_cast<std::size_t>(blockIdx.x) * counters;
  unsigned* const before = totals + a.buckets;
  unsigned* const warp_counters = before + a.buckets;  // [ranking_warps, buckets]
  for (unsigned i = threadIdx.x; i < counters; i += kRouteThreads) {
    totals[i] = 0;
  }
  __syncthreads();

  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned run_rows = a.chunk_rows / a.ranking_warps;
  const unsigned chunk_end = min((blockIdx.x + 1) * a.chunk_rows, a.rows);
  const unsigned first = min(blockIdx.x * a.chunk_rows + warp * run_rows, chunk_end);
  const unsigned last = min(first + run_rows, chunk_end);
  unsigned* const mine = warp_counters + warp * a.buckets;
  unsigned first_bucket = a.buckets;  // of no row
  if (warp < a.ranking_warps && first + lane < last) {
    first_bucket = bucket_of<Compact>(a, first + lane, counted);
    atomicAdd(&mine[first_bucket], 1u);
    for (unsigned i = first + lane + 32; i < last; i += 32) {
      atomicAdd(&mine[bucket_of<Compact>(a, i, counted)], 1u);
    }
  }
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (a.counts) {
    add_up_counts(a, totals, before);
  }
  __syncthreads();
  counts_to_positions<Compact>(a, totals, before, warp_counters, &routed);
  __syncthreads();
  if (warp < a.ranking_warps) {
    place_run<Compact>(a, first, last, mine, counted, first_bucket);
  }
  if constexpr (Compact) mark_tail(a, routed);
}

/// Half of the threads have a row each; all count the rows of experts. At one token a layer waits
/// for this: a load, a barrier, a look at the other rows.
__global__ void __launch_bounds__(kRouteFewThreads) place_few_rows(const RouteArguments a) {
  static_assert(kRouteFewThreads == 2 * kRouteFewRows && kRouteFewRows % 4 == 0);
  __shared__ uint4 shared[kRouteFewRows / 4];
  ptx::griddepcontrol_launch_dependents();  // began after all before it had ended
  auto* const buckets = reinterpret_cast<unsigned*>(shared);
  const unsigned row = threadIdx.x - kRouteFewRows;
  unsigned bucket = a.buckets;  // of no row
  if (row < kRouteFewRows) {
    if (row < a.rows) bucket = bucket_of<false>(a, row, a.rows);
    buckets[row] = bucket;
  }
  __syncthreads();
  const unsigned quads = (a.rows + 3) / 4;
  if (row < a.rows) {
    unsigned position = 0;
    for (unsigned i = 0; i < quads; ++i) {
      const uint4 others = shared[i];
      const auto before = [&](unsigned other, unsigned at) {
        return other < bucket || (other == bucket && at < row) ? 1u : 0u;
      };
      position += before(others.x, 4 * i) + before(others.y, 4 * i + 1) +
                  before(others.z, 4 * i + 2) + before(others.w, 4 * i + 3);
    }
    store_index(a.gather_indices, a.outputs_64_bit, position, row);
    if (a.inverse) store_index(a.inverse, a.outputs_64_bit, row, position);
  }
  for (unsigned expert = threadIdx.x; expert + 1 < a.buckets; expert += kRouteFewThreads) {
    unsigned size = 0;
    for (unsigned i = 0; i < quads; ++i) {
      const uint4 others = shared[i];
      size +=
          (others.x == expert) + (others.y == expert) + (others.z == expert) + (others.w == expert);
    }
    store_index(a.m_sizes, a.outputs_64_bit, expert, size);
  }
}

const ListedKernels listed([] {
  return std::vector<const void*>{reinterpret_cast<const void*>(&count_rows<true, false>),
                                  reinterpret_cast<const void*>(&place_rows<true, false>),
                                  reinterpret_cast<const void*>(&place_few_rows)};
});

/// Positions and counters are 32-bit, and i + 32 must not wrap.
constexpr std::int64_t kMaxRows = std::int64_t{1} << 31;

RoutePlan plan_for(const TensorView& expert_ids, std::int64_t experts) {
  const std::int64_t rows = expert_ids.numel();
  const RoutePlan plan = plan_route(rows, experts);
  if (rows > kMaxRows || plan.counters_per_block() >= kMaxRows) {
    throw Error(ErrorKind::kNotImplemented,
                "route on a GPU takes at most 2^31 rows and 2^27 "
                "experts, got " +
                    std::to_string(rows) + " and " + std::to_string(experts));
  }
  return plan;
}

RouteArguments route_arguments(const RoutePlan& plan, const TensorView& expert_ids,
                               const TensorView& m_sizes, const TensorView& gather_indices,
                               const TensorView& inverse, void* workspace) {
  auto* const counts = static_cast<unsigned*>(workspace);
  return {
      .expert_ids = expert_ids.data,
      .ids_64_bit = expert_ids.dtype == DType::kInt64,
      .ids_dense = expert_ids.row_stride == expert_ids.shape[1] || expert_ids.shape[0] <= 1,
      .topk = static_cast<unsigned>(expert_ids.shape[1]),
      .ids_stride = expert_ids.row_stride,
      .rows = static_cast<unsigned>(expert_ids.numel()),
      .buckets = static_cast<unsigned>(plan.buckets),
      .chunk_rows = static_cast<unsigned>(plan.chunk_rows),
      .blocks = static_cast<unsigned>(plan.blocks),
      .ranking_warps = static_cast<unsigned>(plan.ranking_warps),
      .counts = plan.blocks > 1 ? counts : nullptr,
      .counters = plan.in_shared_memory ? nullptr : counts + plan.shared_counts(),
      .m_sizes = m_sizes.data,
      .gather_indices = gather_indices.data,
      .inverse = inverse.given() ? inverse.data : nullptr,
      .outputs_64_bit = m_sizes.dtype == DType::kInt64,
      .capacity = gather_indices.shape[0],
      .num_tokens = nullptr,
      .num_tokens_64_bit = false,
      .overflow = nullptr,
      .overflow_64_bit = false,
  };
}

template <bool Compact>
void launch_plan(const RoutePlan& plan, RouteArguments& arguments, Device device,
                 const ExecutionContext& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  void* parameters[] = {&arguments};
  if (!Compact && plan.few) {
    launch({reinterpret_cast<const void*>(&place_few_rows), "route place_few_rows", dim3(1),
            dim3(kRouteFewThreads)},
           parameters, stream);
    return;
  }
  const dim3 grid(static_cast<unsigned>(plan.blocks)), block(kRouteThreads);
  const auto start = [&](auto* kernel, const char* name, std::int64_t counters, bool early) {
    launch({reinterpret_cast<const void*>(kernel), name, grid, block,
            plan.in_shared_memory ? static_cast<int>(4 * counters) : 0, early},
           parameters, stream);
  };
  const bool counts_first = plan.blocks > 1;
  if (counts_first) {
    start(plan.in_shared_memory ? &count_rows<true, Compact> : &count_rows<false, Compact>,
          "route count_rows", plan.buckets, false);
  }
  // It reads before it waits: only where the launch ahead is known.
  const bool early = counts_first && starts_early<__CUDA_ARCH_LIST__>(device, context);
  start(plan.in_shared_memory ? &place_rows<true, Compact> : &place_rows<false, Compact>,
        "route place_rows", plan.counters_per_block(), early);
}

}  // namespace

void CudaPasses::route(const TensorView& expert_ids, std::int64_t experts,
                       const TensorView& m_sizes, const TensorView& gather_indices,
                       const TensorView& inverse, void* workspace,
                       const ExecutionContext& context) const {
  const PassLaunch on(expert_ids.device, context);
  const RoutePlan plan = plan_for(expert_ids, experts);
  RouteArguments arguments =
      route_arguments(plan, expert_ids, m_sizes, gather_indices, inverse, workspace);
  launch_plan<false>(plan, arguments, expert_ids.device, context);
}

void CudaPasses::route_compact(const TensorView& expert_ids, std::int64_t experts,
                               const TensorView& m_sizes, const TensorView& gather_indices,
                               const TensorView& positions, const RouteLimits& limits,
                               void* workspace, const ExecutionContext& context) const {
  const PassLaunch on(expert_ids.device, context);
  const RoutePlan plan = plan_for(expert_ids, experts);
  RouteArguments arguments =
      route_arguments(plan, expert_ids, m_sizes, gather_indices, positions, workspace);
  arguments.num_tokens = limits.num_tokens.given() ? limits.num_tokens.data : nullptr;
  arguments.num_tokens_64_bit = limits.num_tokens.dtype == DType::kInt64;
  arguments.overflow = limits.overflow.given() ? limits.overflow.data : nullptr;
  arguments.overflow_64_bit = limits.overflow.dtype == DType::kInt64;
  launch_plan<true>(plan, arguments, expert_ids.device, context);
}

std::int64_t CudaPasses::route_workspace_bytes(std::int64_t rows, std::int64_t experts) const {
  return plan_route(rows, experts).workspace_bytes();
}

}  // namespace moegemm::cuda
