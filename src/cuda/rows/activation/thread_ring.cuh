#pragma once

#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/rows/elements.cuh"

namespace moegemm::cuda {

/// Shared memory of a block's rings; the packs of fp32 are twice as large, and half as many.
constexpr int ring_bytes(int packs, int threads) { return 4 * packs * 16 * threads; }

/// Stages of packs that a thread loads ahead for itself: they stay in flight while it computes,
/// without registers to land in and, since nobody else reads them, without a barrier. The stages of
/// all threads of a block lie in its shared memory.
template <typename T, int Packs, int Threads>
class ThreadRing {
 public:
  /// 128 bytes in flight for each thread without d_act, 192 with it: with 768 threads on a
  /// multiprocessor more than three times what hides the latency of HBM (4.2 TB/s * 0.9 us over 132
  /// of them: 29 KB each), so that warps may also compute.
  static constexpr int kStages = sizeof(T) == 2 ? 4 : 2;
  static constexpr int kBytes = ring_bytes(Packs, Threads);
  static_assert(kBytes == kStages * Packs * static_cast<int>(sizeof(Pack<T>)) * Threads);

  /// `memory` is kBytes of shared memory, 16-byte aligned.
  __device__ __forceinline__ explicit ThreadRing(void* memory)
      : mine_(static_cast<uint4*>(memory) + threadIdx.x) {}

  /// Starts loading pack `i` of a new stage, in the place of the oldest one.
  __device__ __forceinline__ void load(int i, const T* source) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      ptx::cp_async_16(ptx::shared_address(place(i, part)),
                       source + part * (16 / static_cast<int>(sizeof(T))));
    }
  }

  /// The new stage has all that is wanted, which may be nothing.
  __device__ __forceinline__ void commit() {
    ptx::cp_async_commit_group();
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

  /// Until the oldest stage has arrived. Before its place is loaded again, too.
  __device__ __forceinline__ void wait() { ptx::cp_async_wait_group<kStages - 1>(); }

  /// Pack `i` of the oldest stage.
  __device__ __forceinline__ Pack<T> read(int i) const {
    Pack<T> pack;
    auto* parts = reinterpret_cast<uint4*>(&pack);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      parts[part] = *place(i, part);
    }
    return pack;
  }

 private:
  static constexpr int kParts = static_cast<int>(sizeof(Pack<T>)) / 16;

  /// Neighbouring threads have neighbouring 16 bytes: no bank conflicts.
  __device__ __forceinline__ uint4* place(int i, int part) const {
    return mine_ + ((stage_ * Packs + i) * kParts + part) * Threads;
  }

  uint4* mine_;
  int stage_ = 0;
};

}  // namespace moegemm::cuda
