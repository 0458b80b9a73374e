#pragma once

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"

namespace moegemm::cuda {

/// Position in a ring of barriers: which slot, and the parity of its current lap. A consumer waits
/// on full[slot] with `phase`; a producer waits on empty[slot] with `phase ^ 1`, which a fresh
/// barrier passes at once.
template <int Slots>
struct PipelineState {
  int slot = 0;
  std::uint32_t phase = 0;

  /// The state after `position` steps.
  static __device__ __forceinline__ PipelineState at(int position) {
    return {position % Slots, static_cast<std::uint32_t>(position / Slots) & 1};
  }
  __device__ __forceinline__ void advance() {
    if (++slot == Slots) {
      slot = 0;
      phase ^= 1;
    }
  }
  /// Skips `count` positions that somebody else handles.
  __device__ __forceinline__ void advance(int count) {
    const int position = slot + count;
    phase ^= static_cast<std::uint32_t>(position / Slots) & 1;
    slot = position % Slots;
  }
};

/// A ring of shared-memory slots between one producer side and one consumer side.
template <int Slots>
struct Ring {
  std::uint64_t full[Slots];
  std::uint64_t empty[Slots];

  __device__ __forceinline__ void init(int full_count, int empty_count) {
    for (int slot = 0; slot < Slots; ++slot) {
      ptx::mbarrier_init(&full[slot], full_count);
      ptx::mbarrier_init(&empty[slot], empty_count);
    }
  }
  __device__ __forceinline__ void wait_full(const PipelineState<Slots>& state) {
    ptx::mbarrier_wait(&full[state.slot], state.phase);
  }
  __device__ __forceinline__ void wait_empty(const PipelineState<Slots>& state) {
    ptx::mbarrier_wait(&empty[state.slot], state.phase ^ 1);
  }
};

}  // namespace moegemm::cuda
