#pragma once

#include "cuda/device/segments.cuh"
#include "cuda/rows/activation/thread_ring.cuh"
#include "cuda/rows/elements.cuh"
#include "moegemm/activation.h"

namespace moegemm::cuda {

/// Columns that a warp works on at a time: lane l has elements c to c + 7 with c = 8 l.
constexpr int kStripColumns = kWarpSize * kPackElems;

/// A lane's eight elements: the packs that hold their gates and ups, one or two. Every row is
/// 16-byte aligned, and `activated` is a multiple of 8. Called by whole warps, but for add_bias.
template <typename T, GateLayout L>
struct GatePacks {
  static constexpr bool kGated = L != GateLayout::kNone;
  static constexpr int kPacks = kGated ? 2 : 1;
  Pack<T> packs[kPacks];

  /// Starts loading a row's elements c to c + 7.
  template <typename Ring>
  __device__ __forceinline__ static void load(Ring& ring, const T* row, int c, int activated) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int place = offset(i, c, activated);
      if (is_there(place, c, activated)) ring.load(i, row + place);
    }
  }

  /// What `load` has loaded, as the gates and ups of the lane's elements.
  template <typename Ring>
  __device__ __forceinline__ static void read(const Ring& ring, float (&gate)[kPackElems],
                                              float (&up)[kPackElems]) {
    GatePacks loaded;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      loaded.packs[i] = ring.read(i);
    }
    if constexpr (kPairs) exchange(loaded.packs);
    loaded.split(gate, up);
  }

  /// Adds a row of an expert's bias, which its other rows read again: through L1.
  __device__ __forceinline__ static void add_bias(const T* bias, int c, int activated,
                                                  float (&gate)[kPackElems],
                                                  float (&up)[kPackElems]) {
    GatePacks loaded;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      loaded.packs[i] = load_shared_pack(
          bias + (L == GateLayout::kInterleaved ? 2 * c + i * kPackElems : c + i * activated));
    }
    float gate_bias[kPackElems], up_bias[kPackElems];
    loaded.split(gate_bias, up_bias);
#pragma unroll
    for (int i = 0; i < kPackElems; ++i) {
      gate[i] += gate_bias[i];
      if constexpr (kGated) up[i] += up_bias[i];
    }
  }

  /// Stores gates and ups where `load` loads them from, in T or in fp32.
  __device__ __forceinline__ static void store(void* base, bool fp32, std::int64_t row, int c,
                                               int activated, const float (&gate)[kPackElems],
                                               const float (&up)[kPackElems]) {
    if constexpr (L == GateLayout::kInterleaved) {
      float values[2][kPackElems];
#pragma unroll
      for (int i = 0; i < kPackElems; ++i) {
        values[2 * i / kPackElems][2 * i % kPackElems] = gate[i];
        values[2 * i / kPackElems][2 * i % kPackElems + 1] = up[i];
      }
      if constexpr (kPairs) {
        if (!fp32) {
          store_pairs(static_cast<T*>(base) + row, c, activated, values);
          return;
        }
      }
      if (c < activated) {
        store_pack_in<T>(base, fp32, row + 2 * c, values[0]);
        store_pack_in<T>(base, fp32, row + 2 * c + kPackElems, values[1]);
      }
    } else if (c < activated) {
      store_pack_in<T>(base, fp32, row + c, gate);
      if constexpr (L == GateLayout::kConcatenated) {
        store_pack_in<T>(base, fp32, row + activated + c, up);
      }
    }
  }

 private:
  /// Interleaved, a lane's two packs are neighbours, and a warp's accesses to the first ones would
  /// touch half of every 32-byte sector. So the even and the odd lane of a pair access packs 0 and
  /// 1 of the four that are theirs, then 2 and 3, and exchange one: the even lane is to have 0 and
  /// 1, the odd one 2 and 3. (Packs of fp32 are whole sectors.)
  static constexpr bool kPairs = L == GateLayout::kInterleaved && sizeof(Pack<T>) == 16;

  __device__ __forceinline__ static bool is_odd() { return threadIdx.x % 2 == 1; }

  __device__ __forceinline__ static int offset(int i, int c, int activated) {
    if constexpr (L != GateLayout::kInterleaved) {
      return c + i * activated;
    } else if constexpr (kPairs) {
      const int first_of_pair = 2 * (is_odd() ? c - kPackElems : c);
      return first_of_pair + (2 * i + (is_odd() ? 1 : 0)) * kPackElems;
    } else {
      return 2 * c + i * kPackElems;
    }
  }

  /// Whether the pack at `place` is of this row.
  __device__ __forceinline__ static bool is_there(int place, int c, int activated) {
    return kPairs ? place < 2 * activated : c < activated;
  }

  __device__ __forceinline__ static void store_pairs(T* row, int c, int activated,
                                                     const float (&values)[2][kPackElems]) {
    Pack<T> rounded[2] = {round_pack<T>(values[0]), round_pack<T>(values[1])};
    exchange(rounded);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = offset(i, c, activated);
      if (is_there(place, c, activated)) store_raw_pack(row + place, rounded[i]);
    }
  }

  __device__ __forceinline__ static void exchange(Pack<T> (&packs)[kPacks]) {
    const bool odd = is_odd();
    const Pack<T> given = odd ? packs[0] : packs[1];
    Pack<T> got;
    got.bits.x = __shfl_xor_sync(kFullMask, given.bits.x, 1);
    got.bits.y = __shfl_xor_sync(kFullMask, given.bits.y, 1);
    got.bits.z = __shfl_xor_sync(kFullMask, given.bits.z, 1);
    got.bits.w = __shfl_xor_sync(kFullMask, given.bits.w, 1);
    packs[0] = odd ? got : packs[0];
    packs[1] = odd ? packs[1] : got;
  }

  __device__ __forceinline__ void split(float (&gate)[kPackElems], float (&up)[kPackElems]) const {
    if constexpr (L == GateLayout::kInterleaved) {
      float values[2][kPackElems];
      unpack(packs[0], values[0]);
      unpack(packs[1], values[1]);
#pragma unroll
      for (int i = 0; i < kPackElems; ++i) {
        gate[i] = values[2 * i / kPackElems][2 * i % kPackElems];
        up[i] = values[2 * i / kPackElems][2 * i % kPackElems + 1];
      }
    } else {
      unpack(packs[0], gate);
      if constexpr (L == GateLayout::kConcatenated) unpack(packs[1], up);
    }
  }
};

}  // namespace moegemm::cuda
