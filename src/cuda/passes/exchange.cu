#include <algorithm>
#include <cstdint>

#include "cuda/backend/error.h"
#include "cuda/backend/launch/launch.h"
#include "cuda/device/fast_divide.h"
#include "cuda/passes/alignment.h"
#include "cuda/passes/block_sums.cuh"
#include "cuda/passes/elements.cuh"
#include "cuda/passes/passes.h"
#include "moegemm/error.h"

/// What surrounds an exchange of rows: copies in the order in which they are sent, and the order in
/// which an expert finds those that came.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kChunksOfLane = 8;  ///< of a row: 4 KiB of it are a warp's

struct SpreadArguments {
  const void* rows;
  std::int64_t pitch;  // chunks
  void* out;
  std::int64_t out_pitch;
  IndexArray positions;       // [T * topk]
  IndexArray gather_indices;  // [out_rows], or null
  std::int64_t out_rows;
  std::int64_t slots;  // T * topk
  int topk;
  int chunks;  // of a row
  unsigned copying_warps;
  FastDivisor by_turns;
  int turns;  // warps that share a row
};

/// A warp reads its part of a token's row once, and stores it wherever a slot of the token has its
/// row: what is sent is written once, and x is not fetched again for each of its copies.
template <typename Chunk>
__device__ __forceinline__ void copy_token(const SpreadArguments& a, unsigned warp) {
  const auto token = static_cast<std::int64_t>(a.by_turns.divide(warp));
  const int turn = static_cast<int>(warp - static_cast<unsigned>(token) * a.turns);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int first = turn * kWarpSize * kChunksOfLane + lane;
  const Chunk* const source = static_cast<const Chunk*>(a.rows) + token * a.pitch + first;
  Chunk chunks[kChunksOfLane];
#pragma unroll
  for (int i = 0; i < kChunksOfLane; ++i) {
    if (first + i * kWarpSize < a.chunks) chunks[i] = source[i * kWarpSize];
  }
#pragma unroll 1
  for (int base = 0; base < a.topk; base += kWarpSize) {
    const int slot = base + lane;
    const std::int64_t position = slot < a.topk ? a.positions[token * a.topk + slot] : -1;
    unsigned left = __ballot_sync(kFullMask, position >= 0 && position < a.out_rows);
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const std::int64_t row = __shfl_sync(kFullMask, position, __ffs(left) - 1);
      Chunk* const target = static_cast<Chunk*>(a.out) + row * a.out_pitch + first;
#pragma unroll
      for (int i = 0; i < kChunksOfLane; ++i) {
        if (first + i * kWarpSize < a.chunks) target[i * kWarpSize] = chunks[i];
      }
    }
  }
}

/// Zeros for those of 32 rows that no slot has.
template <typename Chunk>
__device__ __forceinline__ void zero_rows(const SpreadArguments& a, std::int64_t first_row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const std::int64_t row = first_row + lane;
  const bool exists = row < a.out_rows;
  const std::int64_t slot = exists ? a.gather_indices[row] : 0;
  unsigned left = __ballot_sync(kFullMask, exists && (slot < 0 || slot >= a.slots));
  for (; left != 0; left &= left - 1) {
    Chunk* const target = static_cast<Chunk*>(a.out) + (first_row + __ffs(left) - 1) * a.out_pitch;
    for (int i = lane; i < a.chunks; i += kWarpSize) target[i] = Chunk{};
  }
}

template <typename Chunk>
__global__ void __launch_bounds__(kThreads) spread_kernel(const SpreadArguments a) {
  const unsigned warp = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  if (warp < a.copying_warps) {
    copy_token<Chunk>(a, warp);
  } else if (a.gather_indices.data) {
    const std::int64_t first_row = std::int64_t{warp - a.copying_warps} * kWarpSize;
    if (first_row < a.out_rows) zero_rows<Chunk>(a, first_row);
  }
}

template <typename Chunk>
void launch_spread(const TensorView& rows, const TensorView& positions,
                   const TensorView& gather_indices, const TensorView& out, const char* name,
                   cudaStream_t stream) {
  const auto chunks = [&rows](std::int64_t elements) {
    return elements * size_bytes(rows.dtype) / static_cast<std::int64_t>(sizeof(Chunk));
  };
  constexpr int kChunksOfWarp = kWarpSize * kChunksOfLane;
  const std::int64_t turns = (chunks(rows.shape[1]) + kChunksOfWarp - 1) / kChunksOfWarp;
  const std::int64_t copying = rows.shape[0] * turns;
  const std::int64_t zeroing = gather_indices.given() ? (out.shape[0] + 31) / 32 : 0;
  if (std::max(copying, zeroing) > std::int64_t{1} << 30) {
    throw Error(ErrorKind::kNotImplemented,
                "spread_rows on a GPU takes at most 2^30 rows of 4 KiB");
  }
  SpreadArguments arguments = {
      .rows = rows.data,
      .pitch = chunks(rows.row_stride),
      .out = out.data,
      .out_pitch = chunks(out.row_stride),
      .positions = indices_of(positions),
      .gather_indices = indices_of(gather_indices),
      .out_rows = out.shape[0],
      .slots = positions.numel(),
      .topk = static_cast<int>(positions.shape[1]),
      .chunks = static_cast<int>(chunks(rows.shape[1])),
      .copying_warps = static_cast<unsigned>(copying),
      .by_turns = make_fast_divisor(static_cast<std::uint32_t>(turns)),
      .turns = static_cast<int>(turns),
  };
  void* parameters[] = {&arguments};
  const std::int64_t blocks = (copying + zeroing + kWarps - 1) / kWarps;
  launch({reinterpret_cast<const void*>(&spread_kernel<Chunk>), name,
          dim3(static_cast<unsigned>(blocks)), dim3(kThreads)},
         parameters, stream);
}

/// Ids of slots, and what they say of ranks.
struct SlotIds {
  IndexArray ids;
  std::int64_t experts_of_rank;
  std::int64_t ranks;

  __device__ __forceinline__ std::int64_t rank(std::int64_t slot) const {
    const std::int64_t id = ids[slot];
    const std::int64_t found = id < 0 ? -1 : id / experts_of_rank;
    return found < ranks ? found : -1;
  }
  /// The expert of a slot as `rank` counts it, or -1 for one of another rank: without a division,
  /// which takes longer than the load.
  __device__ __forceinline__ std::int64_t id_on(std::int64_t rank, std::int64_t slot) const {
    const std::int64_t id = ids[slot] - rank * experts_of_rank;
    return id >= 0 && id < experts_of_rank ? id : -1;
  }
};

constexpr int kCountedRanks = 1024;  ///< whose pairs a block counts in shared memory

/// A thread for each slot.
__global__ void __launch_bounds__(kThreads)
    first_slots_kernel(SlotIds slots, std::int64_t count, unsigned topk,
                       std::int64_t* ranks_of_slots, unsigned long long* pairs) {
  __shared__ unsigned counts[kCountedRanks];
  const bool counted = slots.ranks <= kCountedRanks;
  const int ranks = counted ? static_cast<int>(slots.ranks) : 0;
  for (int r = static_cast<int>(threadIdx.x); r < ranks; r += kThreads) counts[r] = 0;
  __syncthreads();
  const std::int64_t slot = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t rank = slot < count ? slots.rank(slot) : -1;
  if (slot < count) {
    bool first = rank >= 0;
    for (std::int64_t before = slot - slot % topk; first && before < slot; ++before) {
      first = slots.id_on(rank, before) < 0;
    }
    ranks_of_slots[slot] = first ? rank : -1;
  }
  if (rank >= 0 && counted) atomicAdd(&counts[rank], 1u);
  if (rank >= 0 && !counted) atomicAdd(&pairs[rank], 1ull);
  __syncthreads();
  for (int r = static_cast<int>(threadIdx.x); r < ranks; r += kThreads) {
    if (counts[r] != 0) atomicAdd(&pairs[r], static_cast<unsigned long long>(counts[r]));
  }
}

/// A thread for each slot of a row.
__global__ void __launch_bounds__(kThreads)
    ids_at_target_kernel(SlotIds slots, std::int64_t all_slots, IndexArray gather_indices,
                         std::int64_t count, unsigned topk, std::int64_t* ids) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const std::int64_t row = i / topk;
  const std::int64_t slot = gather_indices[row];
  std::int64_t found = -1;
  if (slot >= 0 && slot < all_slots) {
    const std::int64_t target = slots.rank(slot);
    const std::int64_t own = slot - slot % topk + (i - row * topk);
    if (target >= 0) found = slots.id_on(target, own);
  }
  ids[i] = found;
}

struct ArrivalArguments {
  IndexArray counts;  // [ranks, experts]
  std::int64_t counts_stride;
  int ranks;
  int experts;
  std::int64_t room;  // rows of each rank, or -1: as many as it has
  std::int64_t rows;
  void* m_sizes;
  void* gather_indices;
  bool wide;
  std::int64_t* ids;
};

/// What a thread finds in the counts of one rank, for the block's expert.
struct RankCounts {
  std::int64_t all = 0, earlier = 0, own = 0;

  __device__ __forceinline__ RankCounts(const ArrivalArguments& a, int rank, int expert) {
    if (rank >= a.ranks) return;
    for (int e = 0; e < a.experts; ++e) {
      const std::int64_t found = a.counts[rank * a.counts_stride + e];
      const std::int64_t count = max(std::int64_t{0}, min(found, a.rows));
      all += count;
      if (e < expert) earlier += count;
      if (e == expert) own = count;
    }
  }
};

/// Where the rows of one rank for the block's expert lie, and where the expert has them.
struct Run {
  std::int64_t source, target;
  std::int64_t asked;  // rows that the counts tell of
  std::int64_t there;  // of these, those within the rank's part of the buffer
};

/// Block e is for expert e: the rows of every rank for it, one run after the other. The last block
/// is for rows that no count tells of.
__global__ void __launch_bounds__(kThreads) index_arrivals_kernel(const ArrivalArguments a) {
  __shared__ std::int64_t warp_sums[32];
  __shared__ Run runs[kThreads];
  const int expert = static_cast<int>(blockIdx.x);
  std::int64_t target = 0;  // after the rows of all earlier experts
  for (int base = 0; base < a.ranks; base += kThreads) {
    const RankCounts of(a, base + static_cast<int>(threadIdx.x), expert);
    std::int64_t sum = 0;
    block_exclusive_sum(of.earlier, warp_sums, sum);
    target += sum;
  }
  const std::int64_t begin = target;
  std::int64_t ranks_before = 0;
  for (int base = 0; base < a.ranks; base += kThreads) {
    const int rank = base + static_cast<int>(threadIdx.x);
    const RankCounts of(a, rank, expert);
    std::int64_t own = 0, all = 0;
    const std::int64_t own_before = block_exclusive_sum(of.own, warp_sums, own);
    const std::int64_t all_before = block_exclusive_sum(of.all, warp_sums, all);
    const std::int64_t first = a.room < 0 ? ranks_before + all_before : rank * a.room;
    const std::int64_t last = a.room < 0 ? first + of.all : first + a.room;
    const std::int64_t source = first + of.earlier;
    const bool rest = expert == a.experts;
    const std::int64_t left = max(std::int64_t{0}, min(last, a.rows) - source);
    const std::int64_t there = rest ? left : min(of.own, left);
    runs[threadIdx.x] = {source, rest ? a.rows : target + own_before, rest ? there : of.own, there};
    __syncthreads();
    for (int i = 0; i < min(kThreads, a.ranks - base); ++i) {
      const Run run = runs[i];
      for (std::int64_t r = threadIdx.x; r < run.asked; r += kThreads) {
        if (r < run.there) a.ids[run.source + r] = expert;
        if (run.target + r < a.rows) {
          store_index(a.gather_indices, a.wide, run.target + r,
                      r < run.there ? run.source + r : -1);
        }
      }
    }
    __syncthreads();
    target += own;
    ranks_before += all;
  }
  if (expert < a.experts) {
    if (threadIdx.x == 0) {
      store_index(a.m_sizes, a.wide, expert, min(target, a.rows) - min(begin, a.rows));
    }
    return;
  }
  const std::int64_t known = a.room < 0 ? ranks_before : a.rows;
  for (std::int64_t r = known + threadIdx.x; r < a.rows; r += kThreads) a.ids[r] = expert;
  for (std::int64_t r = target + threadIdx.x; r < a.rows; r += kThreads) {
    store_index(a.gather_indices, a.wide, r, -1);
  }
}

}  // namespace

void CudaPasses::spread_rows(const TensorView& rows, const TensorView& positions,
                             const TensorView& gather_indices, const TensorView& out,
                             const ExecutionContext& context) const {
  const PassLaunch on(rows.device, context);
  if (out.shape[0] == 0 || out.shape[1] == 0) return;
  const std::int64_t element = size_bytes(rows.dtype);
  if (is_16_byte_aligned(rows) && is_16_byte_aligned(out) && rows.shape[1] * element % 16 == 0) {
    launch_spread<uint4>(rows, positions, gather_indices, out, "spread_rows (16 bytes)", on.stream);
  } else if (element == 2) {
    launch_spread<std::uint16_t>(rows, positions, gather_indices, out, "spread_rows (2 bytes)",
                                 on.stream);
  } else {
    launch_spread<std::uint32_t>(rows, positions, gather_indices, out, "spread_rows (4 bytes)",
                                 on.stream);
  }
}

void CudaPasses::first_slots(const TensorView& expert_ids, std::int64_t experts_of_rank,
                             const TensorView& ranks_of_slots, const TensorView& pairs,
                             const ExecutionContext& context) const {
  const PassLaunch on(expert_ids.device, context);
  cuda::check(
      cudaMemsetAsync(pairs.data, 0, static_cast<std::size_t>(pairs.shape[0]) * 8, on.stream),
      "zero the pairs of ranks");
  std::int64_t count = expert_ids.numel();
  if (count == 0) return;
  SlotIds slots = {indices_of(expert_ids), experts_of_rank, pairs.shape[0]};
  auto topk = static_cast<unsigned>(expert_ids.shape[1]);
  auto* found = static_cast<std::int64_t*>(ranks_of_slots.data);
  auto* counts = static_cast<unsigned long long*>(pairs.data);
  void* parameters[] = {&slots, &count, &topk, &found, &counts};
  launch({reinterpret_cast<const void*>(&first_slots_kernel), "first_slots",
          dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)), dim3(kThreads)},
         parameters, on.stream);
}

void CudaPasses::ids_at_target(const TensorView& expert_ids, const TensorView& gather_indices,
                               std::int64_t experts_of_rank, const TensorView& ids,
                               const ExecutionContext& context) const {
  const PassLaunch on(expert_ids.device, context);
  std::int64_t count = ids.numel(), all_slots = expert_ids.numel();
  if (count == 0) return;
  SlotIds slots = {indices_of(expert_ids), experts_of_rank, INT64_MAX};
  IndexArray indices = indices_of(gather_indices);
  auto topk = static_cast<unsigned>(expert_ids.shape[1]);
  auto* found = static_cast<std::int64_t*>(ids.data);
  void* parameters[] = {&slots, &all_slots, &indices, &count, &topk, &found};
  launch({reinterpret_cast<const void*>(&ids_at_target_kernel), "ids_at_target",
          dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)), dim3(kThreads)},
         parameters, on.stream);
}

void CudaPasses::index_arrivals(const TensorView& counts, std::int64_t room,
                                const TensorView& m_sizes, const TensorView& gather_indices,
                                const TensorView& expert_ids,
                                const ExecutionContext& context) const {
  const PassLaunch on(counts.device, context);
  ArrivalArguments arguments = {
      .counts = indices_of(counts),
      .counts_stride = counts.row_stride,
      .ranks = static_cast<int>(counts.shape[0]),
      .experts = static_cast<int>(counts.shape[1]),
      .room = room,
      .rows = gather_indices.shape[0],
      .m_sizes = m_sizes.data,
      .gather_indices = gather_indices.data,
      .wide = m_sizes.dtype == DType::kInt64,
      .ids = static_cast<std::int64_t*>(expert_ids.data),
  };
  void* parameters[] = {&arguments};
  launch({reinterpret_cast<const void*>(&index_arrivals_kernel), "index_arrivals",
          dim3(static_cast<unsigned>(arguments.experts + 1)), dim3(kThreads)},
         parameters, on.stream);
}

}  // namespace moegemm::cuda
