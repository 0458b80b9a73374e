#pragma once

#include <algorithm>

#include "cuda/device/fast_divide.h"
#include "cuda/device/warp.h"
#include "cuda/passes/elements.cuh"
#include "cuda/ptx/griddepcontrol.cuh"

/// The top-k sum where positions tell each slot's row, and many slots have none.
///
/// A warp makes 32 packs of some consecutive tokens. Their slots are one list: 32 of them are read
/// at once, a lane each, and those that have a row are then loaded and added one after the other,
/// as many in flight as there are registers, of whatever tokens they are. So neither a slot without
/// a row nor a token without any takes a turn of its own, and the next slots' positions are on
/// their way meanwhile.
namespace moegemm::cuda {

struct PositionedArguments {
  Floats rows;           // [row_count, columns]
  Floats weights;        // [T * topk], or null
  Floats out;            // [T, columns]
  IndexArray positions;  // [T * topk]
  std::int64_t row_count;
  std::int64_t first_token;  // of this launch
  int topk;
  int tokens;
  int tokens_of_warp;
  int packs;  // of a row
  int turns;  // warps that share the packs of a row
  unsigned warps;
  FastDivisor by_turns;
  bool rows_pending;  ///< the launch ahead may still write the rows, and nothing else that is read
};

constexpr int kPositionedThreads = 256;
constexpr int kPositionedBlocks =
    4;  ///< on a multiprocessor: 96 KB in flight where all slots have rows

/// 32 slots of a warp: a lane's row, -1 for none, and its weight.
struct SlotsOfWarp {
  int row;
  float weight;

  /// Slot `slot` of those that begin at `first`; there are `count`.
  __device__ __forceinline__ void load(const PositionedArguments& a, std::int64_t first,
                                       unsigned slot, unsigned count) {
    row = -1;
    weight = 1.0f;
    if (slot >= count) return;
    const std::int64_t position = a.positions[first + slot];
    if (a.weights.data) weight = a.weights.load(first + slot);
    if (position >= 0 && position < a.row_count) row = static_cast<int>(position);
  }
};

/// Adds rows to the tokens of a warp, in the order of their slots, which are counted from the first
/// of these tokens on.
template <typename T>
struct TokenSums {
  static constexpr int kInFlight = sizeof(T) == 2 ? 6 : 3;  ///< rows

  const PositionedArguments& a;
  const bool exists;   // this lane's pack does
  const T* source;     // the pack in row 0
  std::int64_t place;  // and in the token that is summed
  unsigned token_end;  // whose slots are below this
  float sums[kPackElems];

  /// Stores the tokens whose slots are all before this one.
  __device__ __forceinline__ void finish_before(unsigned slot) {
#pragma unroll 1
    while (slot >= token_end) {
      if (exists) store_pack_in<T>(a.out.data, a.out.dtype == DType::kFloat32, place, sums);
#pragma unroll
      for (float& sum : sums) sum = 0.0f;
      place += a.out.stride;
      token_end += static_cast<unsigned>(a.topk);
    }
  }

  /// The slots from `first` on that have a row.
  __device__ __forceinline__ void add(const SlotsOfWarp& slots, unsigned first) {
    const int stride = static_cast<int>(a.rows.stride);
    unsigned left = __ballot_sync(kFullMask, slots.row >= 0);
    while (left != 0) {
      Pack<T> loaded[kInFlight];
      unsigned ahead = left;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (ahead == 0) break;
        const int row = __shfl_sync(kFullMask, slots.row, __ffs(ahead) - 1);
        if (exists) loaded[i] = load_pack(source + std::int64_t{row} * stride);
        ahead &= ahead - 1;
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (left == 0) break;
        const int slot = __ffs(left) - 1;
        const float weight = __shfl_sync(kFullMask, slots.weight, slot);
        finish_before(first + static_cast<unsigned>(slot));
        float values[kPackElems];
        unpack(loaded[i], values);
#pragma unroll
        for (int j = 0; j < kPackElems; ++j) sums[j] = fmaf(weight, values[j], sums[j]);
        left &= left - 1;
      }
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kPositionedThreads, kPositionedBlocks)
    combine_positioned(const PositionedArguments a) {
  if (!a.rows_pending) ptx::griddepcontrol_wait();
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned warp = (blockIdx.x * kPositionedThreads + threadIdx.x) / kWarpSize;
  if (warp >= a.warps) {
    ptx::griddepcontrol_wait();
    return;
  }
  const auto group = static_cast<int>(a.by_turns.divide(warp));
  const int pack = (static_cast<int>(warp) - group * a.turns) * kWarpSize + static_cast<int>(lane);
  const int group_token = group * a.tokens_of_warp;
  const std::int64_t token = a.first_token + group_token;
  const std::int64_t first = token * a.topk, column = std::int64_t{pack} * kPackElems;
  const auto tokens = static_cast<unsigned>(min(a.tokens_of_warp, a.tokens - group_token));
  const unsigned count = tokens * static_cast<unsigned>(a.topk);
  TokenSums<T> sums = {a,
                       pack < a.packs,
                       static_cast<const T*>(a.rows.data) + column,
                       token * a.out.stride + column,
                       static_cast<unsigned>(a.topk),
                       {}};
  SlotsOfWarp slots;
  slots.load(a, first, lane, count);
  if (a.rows_pending) ptx::griddepcontrol_wait();
#pragma unroll 1
  for (unsigned done = 0; done < count; done += kWarpSize) {
    SlotsOfWarp next;
    next.load(a, first, done + kWarpSize + lane, count);
    sums.add(slots, done);
    slots = next;
  }
  sums.finish_before(count);
}

/// Tokens of a warp: so few that all multiprocessors have warps enough, and no more than what 32
/// lanes read at once.
inline std::int64_t tokens_of_warp(std::int64_t tokens, std::int64_t topk, std::int64_t turns) {
  constexpr std::int64_t kEnoughWarps = 8192;  // 1.6 times what an H200 holds at once
  const std::int64_t most = std::max<std::int64_t>(kWarpSize / std::max<std::int64_t>(topk, 1), 1);
  return std::clamp<std::int64_t>(tokens * turns / kEnoughWarps, 1, most);
}

}  // namespace moegemm::cuda
