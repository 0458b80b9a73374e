#pragma once

#include "cuda/device/segments.cuh"
#include "cuda/passes/elements.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/shared_memory.cuh"

namespace moegemm::cuda {

/// Stages of a ring that has `stages` with 16-bit elements: the packs of fp32 are twice as large.
constexpr int ring_stages(int stages, std::int64_t element_bytes) {
  return element_bytes == 2 ? stages : (stages + 1) / 2;
}

/// Shared memory of a block's rings.
constexpr int ring_bytes(int stages, std::int64_t element_bytes, int packs, int threads) {
  return ring_stages(stages, element_bytes) * packs * kPackElems * static_cast<int>(element_bytes) *
         threads;
}

/// Stages of packs that a thread loads ahead for itself: they stay in flight while it computes,
/// without registers to land in and, since nobody else reads them, without a barrier. The stages of
/// all threads of a block lie in its shared memory.
template <typename T, int Packs, int Threads, int Stages>
class ThreadRing {
 public:
  static constexpr int kStages = ring_stages(Stages, sizeof(T));
  static constexpr int kBytes = ring_bytes(Stages, sizeof(T), Packs, Threads);

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

  /// Quads l and l + 32 of the 64 that are the warp's packs `i`, for lane l. A barrier of the warp
  /// is to be between `wait` and this, and between this and the next `load`.
  __device__ __forceinline__ Pack<T> read_quads(int i) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    Pack<T> pack;
    if constexpr (kParts == 1) {
      const auto* quads = reinterpret_cast<const uint2*>(place(i, 0) - lane) + lane;
      const uint2 low = quads[0], high = quads[kWarpSize];
      pack.bits = make_uint4(low.x, low.y, high.x, high.y);
    } else {
      const auto* quads = reinterpret_cast<const float4*>(place(i, lane % 2)) - lane + lane / 2;
      pack.low = quads[0];
      pack.high = quads[kWarpSize / 2];
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
