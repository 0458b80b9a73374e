#pragma once

#include "cuda/device/segments.cuh"
#include "cuda/passes/elements.cuh"
#include "cuda/passes/thread_ring.cuh"
#include "moegemm/passes.h"

namespace moegemm::cuda {

/// Columns that a warp works on at a time.
constexpr int kStripColumns = kWarpSize * kPackElems;

/// A lane's eight elements of a strip, and the one or two packs that hold their gates and ups.
/// Every row is 16-byte aligned, and `activated`, the columns of an activated row, is a multiple
/// of 8.
///
/// Lanes have packs that lie side by side, so that each access of a warp is to whole lines. For
/// most layouts lane l then has elements c to c + 7 with c = 8 l. Interleaved, a pack is the gates
/// and ups of four elements only: lane l has c to c + 3 with c = 4 l, and the same four in the
/// other half of the strip, which may be past the row's end. Those are two parts; what other
/// layouts have is one.
template <typename T, GateLayout L>
struct GatePacks {
  static constexpr bool kGated = L != GateLayout::kNone;
  static constexpr int kPacks = kGated ? 2 : 1;
  static constexpr int kParts = L == GateLayout::kInterleaved ? 2 : 1;
  static constexpr int kElems = kPackElems / kParts;  // of a part
  Pack<T> packs[kPacks];

  /// The lane's c in a strip.
  __device__ __forceinline__ static int first_column(int strip) {
    return strip * kStripColumns + static_cast<int>(threadIdx.x) % kWarpSize * kElems;
  }

  /// The first column of a part.
  __device__ __forceinline__ static int column_of(int part, int c) {
    return c + part * (kStripColumns / 2);
  }

  /// Starts loading the packs of a row.
  template <typename Ring>
  __device__ __forceinline__ static void load(Ring& ring, const T* row, int c, int activated) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (has_pack(i, c, activated)) ring.load(i, row + offset(i, c, activated));
    }
  }

  /// What `load` has loaded.
  template <typename Ring>
  __device__ __forceinline__ static GatePacks read(const Ring& ring) {
    GatePacks loaded;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      loaded.packs[i] = ring.read(i);
    }
    return loaded;
  }

  /// The packs of an expert's bias, which its other rows read again: through L1.
  __device__ __forceinline__ static GatePacks load_bias(const T* bias, int c, int activated) {
    GatePacks loaded;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (has_pack(i, c, activated)) {
        loaded.packs[i] = load_shared_pack(bias + offset(i, c, activated));
      }
    }
    return loaded;
  }

  __device__ __forceinline__ void split(int part, float (&gate)[kElems],
                                        float (&up)[kElems]) const {
    if constexpr (kParts == 2) {
      float values[kPackElems];
      unpack(packs[part], values);
#pragma unroll
      for (int i = 0; i < kElems; ++i) {
        gate[i] = values[2 * i];
        up[i] = values[2 * i + 1];
      }
    } else {
      unpack(packs[0], gate);
      if constexpr (kGated) unpack(packs[1], up);
    }
  }

  /// Adds a part of these packs of a bias to a row's gates and ups.
  __device__ __forceinline__ void add_to(int part, float (&gate)[kElems],
                                         float (&up)[kElems]) const {
    float gate_bias[kElems], up_bias[kElems];
    split(part, gate_bias, up_bias);
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      gate[i] += gate_bias[i];
      if constexpr (kGated) up[i] += up_bias[i];
    }
  }

  /// Stores a part's gates and ups where `load` loads them from, in T or in fp32. c is the part's.
  __device__ __forceinline__ static void store(void* base, bool fp32, std::int64_t row, int c,
                                               int activated, const float (&gate)[kElems],
                                               const float (&up)[kElems]) {
    if constexpr (kParts == 2) {
      float values[kPackElems];
#pragma unroll
      for (int i = 0; i < kElems; ++i) {
        values[2 * i] = gate[i];
        values[2 * i + 1] = up[i];
      }
      store_pack_in<T>(base, fp32, row + 2 * c, values);
    } else {
      store_pack_in<T>(base, fp32, row + c, gate);
      if constexpr (kGated) store_pack_in<T>(base, fp32, row + activated + c, up);
    }
  }

  /// Starts loading the lane's elements of a row of activated columns; with two parts, a pack that
  /// other lanes of the warp wait for.
  template <typename Ring>
  __device__ __forceinline__ static void load_activated(Ring& ring, int i, const T* row, int c,
                                                        int activated) {
    if constexpr (kParts == 2) c += static_cast<int>(threadIdx.x) % kWarpSize * kElems;
    if (c < activated) ring.load(i, row + c);
  }

  /// What the warp has loaded so. With two parts called by the whole warp, after its ring.wait; the
  /// pack may be loaded anew then.
  template <typename Ring>
  __device__ __forceinline__ static Pack<T> read_activated(const Ring& ring, int i) {
    if constexpr (kParts == 1) {
      return ring.read(i);
    } else {
      __syncwarp();
      const Pack<T> pack = ring.read_quads(i);
      __syncwarp();
      return pack;
    }
  }

  __device__ __forceinline__ static void split_activated(const Pack<T>& pack, int part,
                                                         float (&values)[kElems]) {
    if constexpr (kParts == 1) {
      unpack(pack, values);
    } else {
      unpack_quad(pack, part, values);
    }
  }

  /// Stores a part of a row of activated columns, in T or in fp32. c is the part's.
  __device__ __forceinline__ static void store_activated(void* base, bool fp32, std::int64_t row,
                                                         int c, const float (&values)[kElems]) {
    if constexpr (kParts == 1) {
      store_pack_in<T>(base, fp32, row + c, values);
    } else {
      store_quad_in<T>(base, fp32, row + c, values);
    }
  }

 private:
  __device__ __forceinline__ static int offset(int i, int c, int activated) {
    return kParts == 2 ? 2 * column_of(i, c) : c + i * activated;
  }

  __device__ __forceinline__ static bool has_pack(int i, int c, int activated) {
    return (kParts == 2 ? column_of(i, c) : c) < activated;
  }
};

}  // namespace moegemm::cuda
