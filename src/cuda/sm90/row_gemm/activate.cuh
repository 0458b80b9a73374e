#pragma once

#include "cuda/device/activation_math.cuh"
#include "cuda/device/swizzle.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/row_gemm/params.h"
#include "cuda/sm90/row_gemm/store.cuh"

/// The epilogue of activated tiles: nothing but activated rows is stored. It activates what a plain
/// tile would have stored, rounded to 16 bits, so that a layer's bits are those of the product with
/// a pass after it. Rounding first also halves the registers that wait for their activation, and
/// one copy of this code serves every compiled N.
namespace moegemm::cuda::sm90 {

/// Rows that are staged at a time.
constexpr int kPieceRows = 16;

/// Columns of a row that a thread has.
constexpr int kQuad = 4;

/// Of a warpgroup's gates, and of its ups: two blocks, or the halves of one.
template <typename Traits>
constexpr int kHalfColumns = Traits::kBlocks * 32;
template <typename Traits>
constexpr int kRowThreads = kHalfColumns<Traits> / kQuad;
/// Rows that a warpgroup activates at the same time.
template <typename Traits>
constexpr int kRowStep = kWarpgroupThreads / kRowThreads<Traits>;

/// Rows that a thread activates together. Two hide each other's latency, which matters where no
/// other tile is multiplied meanwhile; larger tiles have no registers for that.
template <typename Traits>
constexpr int kRowsTogether = Traits::kRows <= 160 && 2 * kRowStep<Traits> <= kPieceRows ? 2 : 1;

template <typename T>
__device__ __forceinline__ void unpack(const std::byte* shared, float (&values)[kQuad]) {
  const uint2 bits = *reinterpret_cast<const uint2*>(shared);
  const auto* elements = reinterpret_cast<const T*>(&bits);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) values[i] = static_cast<float>(elements[i]);
}

/// Where both halves of a consumer's tile have their columns.
struct BlockColumns {
  int first;
  int second;  ///< the same columns after a gate
};

/// Copies the biases of a warpgroup's features to shared memory.
template <typename Traits>
__device__ __forceinline__ void share_bias(const RowGemmParams& params, int expert,
                                           const BlockColumns& columns, int thread,
                                           std::byte* shared) {
  using T = typename Traits::Element;
  constexpr int kHalf = kHalfColumns<Traits>;
  static_assert(2 * kHalf <= kWarpgroupThreads && 2 * kHalf * sizeof(T) <= kBiasBytes);
  if (2 * kHalf < kWarpgroupThreads && thread >= 2 * kHalf) return;
  const bool second = thread >= kHalf;
  // Columns past the last are not stored.
  const int column =
      min((second ? columns.second : columns.first) + thread % kHalf, params.columns - 1);
  const T* bias = static_cast<const T*>(params.bias) + expert * params.bias_stride;
  reinterpret_cast<T*>(shared)[thread] =
      bias[(second ? params.first_up : 0) + column * params.bias_step];
}

/// gate = f(gate), times its up where there is one.
template <int Count>
__device__ __forceinline__ void activate(const Activation& activation, float (&gate)[Count][kQuad],
                                         const float (&up)[Count][kQuad]) {
  with_function(activation.function, [&]<ActivationFunction F>() {
#pragma unroll
    for (auto& quad : gate) {
#pragma unroll
      for (float& g : quad) {
        g = activation_at<F>(ptx::min_nan(g, activation.limit), activation.alpha).value;
      }
    }
  });
  if (!activation.gated()) return;
#pragma unroll
  for (int r = 0; r < Count; ++r) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) gate[r][i] *= up_factor(activation, up[r][i]);
  }
}

template <typename T>
__device__ __forceinline__ void store_quad(const RowGemmParams& params, int row, int column,
                                           const float (&values)[kQuad]) {
  T* line = static_cast<T*>(params.out) + row * params.out_stride;
  const uint2 bits = {round_pair(values[0], values[1], T{}), round_pair(values[2], values[3], T{})};
  if (params.vector_store) {
    if (column < params.columns) *reinterpret_cast<uint2*>(line + column) = bits;
    return;
  }
  const auto* elements = reinterpret_cast<const T*>(&bits);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    if (column + i < params.columns) line[column + i] = elements[i];
  }
}

/// Activates and stores a thread's quads of 16 staged rows. `blocks`: the rows of the first block,
/// those of the second after them; or of one, whose second half is the ups.
template <typename Traits>
__device__ __forceinline__ void store_piece(const RowGemmParams& params, const Tile& tile, int base,
                                            const BlockColumns& columns, int thread,
                                            const std::byte* blocks, const std::byte* biases) {
  using T = typename Traits::Element;
  constexpr int kHalf = kHalfColumns<Traits>;
  constexpr int kStep = kRowStep<Traits>;
  constexpr int kTogether = kRowsTogether<Traits>;
  static_assert(kStep % 8 == 0, "rows apart by periods of the swizzle");
  const int quad = thread % kRowThreads<Traits> * kQuad;
  const int local = thread / kRowThreads<Traits>;
  const std::byte* quads = blocks + swizzle_128b(local, quad / 8) + quad % 8 * 2;
  // The swizzle exchanges the halves of a row or leaves them: from one to the other is the sum or
  // the difference.
  const int to_second = Traits::kBlocks == 2
                            ? kPieceRows * kRowBytes
                            : swizzle_128b(local, quad / 8 + 4) - swizzle_128b(local, quad / 8);
#pragma unroll 1  // the functions once
  for (int done = 0; done < kPieceRows; done += kStep * kTogether) {
    float first[kTogether][kQuad], second[kTogether][kQuad];
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const std::byte* row = quads + (done + r * kStep) * kRowBytes;
      unpack<T>(row, first[r]);
      unpack<T>(row + to_second, second[r]);
    }
    if (params.bias) {
      float bias[2][kQuad];
      unpack<T>(biases + quad * 2, bias[0]);
      unpack<T>(biases + (kHalf + quad) * 2, bias[1]);
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          first[r][i] += bias[0][i];
          second[r][i] += bias[1][i];
        }
      }
    }
    int column = columns.first;
#pragma unroll 1
    while (true) {
      activate<kTogether>(params.activation, first, second);
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        const int row = base + local + done + r * kStep;
        if (row < tile.rows) store_quad<T>(params, tile.row + row, column + quad, first[r]);
      }
      if (column == columns.second) break;  // at once with a gate
      column = columns.second;
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) first[r][i] = second[r][i];
      }
    }
  }
}

/// 16 rows at a time: a block becomes rows of 128 bytes in shared memory, where a thread finds
/// four gates of a row and their ups. Two buffers, so one barrier per 16 rows, and the next ones
/// are staged before these are read (see store_rows).
template <typename Traits>
__device__ __forceinline__ void store_activated(const RowGemmParams& params,
                                                const RowGemmShared<Traits>& shared, int slot,
                                                const RoundedTile<Traits>& rounded,
                                                bool rehearsal) {
  constexpr int kBlockBytes = kPieceRows * kRowBytes;
  constexpr int kPieceBytes = Traits::kBlocks * kBlockBytes;
  static_assert((Traits::kRows > kPieceRows ? 2 : 1) * kPieceBytes <=
                Traits::kStagingBytes / kConsumers);
  Tile tile;  // read again, not kept through the main loop
  if (!Traits::kStreams || !rehearsal) tile = shared.tiles()[slot];
  // Opaque: what follows from it must not wait in registers while the next tile is multiplied.
  const auto index = static_cast<int>(ptx::opaque(threadIdx.x));
  const int consumer = index / kWarpgroupThreads - 1;
  const int thread = index % kWarpgroupThreads;
  const int lane = thread % kWarpSize;
  const int barrier = barrier_id(NamedBarrier::kStore, consumer);
  const bool gated = params.activation.gated();
  const int column = (gated ? tile.feature / 2 : tile.feature) + consumer * Traits::kConsumerStep;
  const BlockColumns columns = {column, gated ? column : column + Traits::kBlockStep};
  // Matrices of stmatrix: rows 0-7 of features 0-7 and 8-15, then rows 8-15 of both.
  const int write_offset =
      swizzle_128b(lane % 8 + lane / 16 * 8, thread / kWarpSize * 2 + lane / 8 % 2);
  std::byte* const biases = shared.biases(consumer);
  // Nobody may still read what the last tile left. Pingpong met at the main loop's barrier.
  if constexpr (!Traits::kPingpong) ptx::bar_sync(barrier, kWarpgroupThreads);
  // A rehearsal runs before the launch ahead has ended: see LaunchStart.
  const bool counts = !Traits::kStreams || !rehearsal;
  if (params.bias && counts) share_bias<Traits>(params, tile.expert, columns, thread, biases);
  const auto blocks_at = [&](int base) {
    return shared.staging(consumer) + base / kPieceRows % 2 * kPieceBytes;
  };
  const auto stage = [&](int base) {
#pragma unroll
    for (int block = 0; block < Traits::kBlocks; ++block) {
      const std::uint32_t* pairs = rounded.pairs[block] + base / 4;
      ptx::stmatrix_x4_trans(
          ptx::shared_address(blocks_at(base) + block * kBlockBytes) + write_offset, pairs[0],
          pairs[1], pairs[2], pairs[3]);
    }
  };
  stage(0);
#pragma unroll
  for (int base = 0; base < Traits::kRows; base += kPieceRows) {
    ptx::bar_sync(barrier, kWarpgroupThreads);
    if (base + kPieceRows < Traits::kRows) stage(base + kPieceRows);
    if (base < tile.rows || (Traits::kStreams && rehearsal && base == 0)) {
      store_piece<Traits>(params, tile, base, columns, thread, blocks_at(base), biases);
    }
  }
}

}  // namespace moegemm::cuda::sm90
