#pragma once

#include "cuda/device/element.cuh"
#include "cuda/device/segments.cuh"
#include "cuda/device/swizzle.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/row_gemm/params.h"

/// The epilogue of the row GEMMs: accumulators to rows of the output, in order or scattered.
namespace moegemm::cuda::sm90 {

/// Where the rows of a tile go.
struct RowTargets {
  const int* destinations;  ///< null: in order
  int first;
  int rows;

  /// Destination of a row of the tile, or -1.
  __device__ __forceinline__ int operator()(int row) const {
    if (row >= rows) return -1;
    return destinations ? destinations[row] : first + row;
  }
};

/// Rows that were gathered are never scattered: a product has one permutation.
template <typename Traits>
__device__ __forceinline__ RowTargets row_targets(const RowGemmParams& params,
                                                  const RowGemmShared<Traits>& shared,
                                                  const Tile& tile, int slot) {
  return {!Traits::kGathered && params.scatter ? shared.destinations(slot) : nullptr, tile.row,
          tile.rows};
}

/// Scales the fp32 results of one m64 block by the router weights of their rows.
template <int N>
__device__ __forceinline__ void scale_block(float (&d)[N / 2], const float* scales, int lane) {
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const float2 scale = *reinterpret_cast<const float2*>(scales + 8 * j + 2 * (lane % 4));
    d[4 * j] *= scale.x;
    d[4 * j + 1] *= scale.y;
    d[4 * j + 2] *= scale.x;
    d[4 * j + 3] *= scale.y;
  }
}

/// Adds the bias of an expert to the fp32 results of one m64 block: a thread has two features.
template <typename Traits, int N>
__device__ __forceinline__ void add_block_bias(const RowGemmParams& params, int expert, int feature,
                                               float (&d)[N / 2]) {
  using T = typename Traits::Element;
  const T* bias = static_cast<const T*>(params.bias) + expert * params.bias_stride;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize % 4;
  const int last = params.features - 1;  // features past it are not stored
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float value =
        static_cast<float>(__ldg(bias + min(feature + Traits::feature_of(warp, lane, half), last)));
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      d[4 * j + 2 * half] += value;
      d[4 * j + 2 * half + 1] += value;
    }
  }
}

/// fp32 results go straight from registers: eight lanes fill one 32-byte sector.
template <typename Traits, int N>
__device__ __forceinline__ void store_block_fp32(const RowGemmParams& params,
                                                 const RowTargets& targets, int feature,
                                                 const float (&d)[N / 2]) {
  // Many N: what follows from the thread for all of them must not wait in registers.
  const unsigned index = Traits::kTabled ? ptx::thread_index() : threadIdx.x;
  const int lane = index % kWarpSize;
  const int warp = index / kWarpSize % 4;
  auto* out = static_cast<float*>(params.out);
  constexpr int kStep = Traits::kHalfStep;
  const int column = feature + Traits::feature_of(warp, lane, 0);
  if constexpr (Traits::kGathered) {  // rows in order: one pointer, opaque so that it stays one
    const int own = lane % 4 * 2;
    float* line = out + (targets.first + own) * params.out_stride + column;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * j + own + i >= targets.rows) continue;
        float* at = line + i * params.out_stride;
        if (column < params.features) at[0] = d[4 * j + i];
        if (column + kStep < params.features) at[kStep] = d[4 * j + 2 + i];
      }
      line = ptx::opaque(line + 8 * params.out_stride);
    }
  } else {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = targets(8 * j + 2 * (lane % 4) + i);
        if (row < 0) continue;
        float* line = out + row * params.out_stride;
        if (column < params.features) line[column] = d[4 * j + i];
        if (column + kStep < params.features) line[column + kStep] = d[4 * j + 2 + i];
      }
    }
  }
}

/// Sixteen bytes of one output row, or its elements one by one where the output is not aligned.
/// `Columns`: how many there are, read where it is needed, since registers are short.
template <typename T, int RowGemmParams::*Columns = &RowGemmParams::features>
__device__ __forceinline__ void store_chunk(const RowGemmParams& params, int row, int column,
                                            const uint4& value) {
  T* line = static_cast<T*>(params.out) + row * params.out_stride;
  if (params.vector_store) {
    if (column < params.*Columns) *reinterpret_cast<uint4*>(line + column) = value;
    return;
  }
  const auto* elements = reinterpret_cast<const T*>(&value);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i < params.*Columns) line[column + i] = elements[i];
  }
}

/// The i-th pair of 16-bit results: two rows of a feature, or two features of a row.
template <typename Traits, int N>
__device__ __forceinline__ std::uint32_t rounded_pair(const float (&d)[N / 2], int i) {
  const int first = Traits::kFeaturePairs ? i / 2 * 4 + i % 2 : 2 * i;
  return round_pair(d[first], d[first + (Traits::kFeaturePairs ? 2 : 1)],
                    typename Traits::Element{});
}

/// The results of a warpgroup's blocks as 16-bit pairs. They come from the code of any N;
/// what is done with them is compiled once.
template <typename Traits>
struct RoundedTile {
  std::uint32_t pairs[Traits::kBlocks][Traits::kRows / 4];

  /// Opaque: else the compiler moves the rounding after the branches of all N, and what they have
  /// in common would be twice the registers.
  template <int N>
  __device__ __forceinline__ void take(const float (&d)[Traits::kBlocks][N / 2]) {
#pragma unroll
    for (int block = 0; block < Traits::kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < Traits::kRows / 4; ++i) {
        pairs[block][i] = i < N / 4 ? ptx::opaque(rounded_pair<Traits, N>(d[block], i)) : 0;
      }
    }
  }
};

/// What follows the product in fp32: bias and router weights; fp32 results are stored at once.
template <typename Traits, int N>
__device__ __forceinline__ void finish_results(const RowGemmParams& params,
                                               const RowGemmShared<Traits>& shared,
                                               const Tile& tile, int slot,
                                               float (&d)[Traits::kBlocks][N / 2]) {
  const int index = ptx::thread_index();
  const int first = tile.feature + (index / kWarpgroupThreads - 1) * Traits::kConsumerStep;
#pragma unroll
  for (int m = 0; m < Traits::kBlocks; ++m) {
    const int feature = first + m * 64;
    if constexpr (Traits::kAddsBias) {
      // Not in a rehearsal, which runs before the launch ahead has ended: see LaunchStart.
      const bool counts = !Traits::kStreams || tile.rows > 0;
      if (params.bias && counts) add_block_bias<Traits, N>(params, tile.expert, feature, d[m]);
    }
    if (params.multiply) scale_block<N>(d[m], shared.scales(slot), index % kWarpSize);
    if (params.out_is_fp32) {
      store_block_fp32<Traits, N>(params, row_targets(params, shared, tile, slot), feature, d[m]);
    }
  }
}

/// Stages the pairs of features of 16 rows (of `count`) that a thread has: pair 2 j + i is in row
/// 8 j + 2 (lane % 4) + i.
template <typename Traits, typename Pair>
__device__ __forceinline__ void stage_feature_pairs(std::byte* rows, int count, int warp, int lane,
                                                    const Pair& pair) {
  const int column = Traits::feature_of(warp, lane, 0);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    std::byte* const at = rows + swizzle_128b(lane % 4 * 2 + i, column / 8) + column % 8 * 2;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (8 * j < count)
        *reinterpret_cast<std::uint32_t*>(at + j * 8 * kRowBytes) = pair(2 * j + i);
    }
  }
}

/// The 16-bit results of a warpgroup; `pair(m, i)` is the i-th pair of the thread's accumulators in
/// block m. stmatrix turns [64 features][rows] into rows of 128 bytes, then eight lanes store each
/// row. A step is kStagedRows rows of one block. Shared memory answers late while the other
/// warpgroup multiplies, so the next step is staged, in the other buffer, before this one is read,
/// and all that a step reads is requested at once: Qwen3-Next fwd2 on an H200 383 microseconds, 393
/// with one after the other.
template <typename Traits, int MaxRows, typename Pair>
__device__ __forceinline__ void store_rows(const RowGemmParams& params,
                                           const RowGemmShared<Traits>& shared, const Tile& tile,
                                           int slot, const Pair& pair) {
  constexpr int kSteps = (MaxRows + kStagedRows - 1) / kStagedRows * Traits::kBlocks;
  const int index = ptx::thread_index();
  const int consumer = index / kWarpgroupThreads - 1;
  const int thread = index % kWarpgroupThreads;
  const int lane = thread % kWarpSize;
  const int barrier = barrier_id(NamedBarrier::kStore, consumer);
  const RowTargets targets = row_targets(params, shared, tile, slot);
  const int rows = ptx::uniform(tile.rows);
  const int column = tile.feature + consumer * Traits::kConsumerStep + thread % 8 * 8;
  // Matrices of stmatrix: rows 0-7 of features 0-7 and 8-15, then rows 8-15 of both.
  const int write_offset =
      swizzle_128b(lane % 8 + lane / 16 * 8, thread / kWarpSize * 2 + lane / 8 % 2);
  const int read_offset = swizzle_128b(thread / 8, thread % 8);
  const auto exists = [&](int step) {
    return step < kSteps && (!Traits::kCommonStores || step / Traits::kBlocks * kStagedRows < rows);
  };
  const auto buffer = [&](int step) {
    return shared.staging(consumer) + step % 2 * kStagedRows * kRowBytes;
  };
  const auto stage = [&](int step) {
    const int m = step % Traits::kBlocks;
    const int base = step / Traits::kBlocks * kStagedRows;
#pragma unroll
    for (int group = base; group < base + kStagedRows && group < MaxRows; group += 16) {
      const int i = group / 4;
      const std::uint32_t address =
          ptx::shared_address(buffer(step)) + write_offset + (group - base) * kRowBytes;
      if constexpr (Traits::kFeaturePairs) {
        stage_feature_pairs<Traits>(buffer(step) + (group - base) * kRowBytes, MaxRows - group,
                                    thread / kWarpSize, lane,
                                    [&](int of_group) { return pair(m, i + of_group); });
      } else if (group + 16 <= MaxRows) {
        ptx::stmatrix_x4_trans(address, pair(m, i), pair(m, i + 1), pair(m, i + 2), pair(m, i + 3));
      } else {
        ptx::stmatrix_x2_trans(address, pair(m, i), pair(m, i + 1));
      }
    }
  };
  // Nobody may still read the buffer of the last tile. Pingpong met at the main loop's barrier.
  if constexpr (!Traits::kPingpong) ptx::bar_sync(barrier, kWarpgroupThreads);
  constexpr int kEach = kStagedRows / 16;  // rows of a thread in a step
  int row[kEach];
  stage(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (!exists(step)) break;
    const int m = step % Traits::kBlocks;
    const int base = step / Traits::kBlocks * kStagedRows;
    if (m == 0) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) row[i] = targets(base + i * 16 + thread / 8);
    }
    ptx::bar_sync(barrier, kWarpgroupThreads);
    if (exists(step + 1)) stage(step + 1);
    uint4 values[kEach];
#pragma unroll
    for (int i = 0; i < kEach && base + i * 16 < MaxRows; ++i) {
      values[i] = *reinterpret_cast<const uint4*>(buffer(step) + read_offset + i * 16 * kRowBytes);
    }
#pragma unroll
    for (int i = 0; i < kEach && base + i * 16 < MaxRows; ++i) {
      if (row[i] >= 0)
        store_chunk<typename Traits::Element>(params, row[i], column + m * 64, values[i]);
    }
  }
}

/// The same for results in order, without waiting for memory: rows are staged, and TMA copies them
/// while the next tile is multiplied. Blocks whose tiles take the same time store at the same time,
/// and then memory is slow: on an H200 a tile of 256 rows took 3700 clocks in store_rows, of the
/// 36000 of its 32 stages. Rows past the last full box are stored by the threads.
template <typename Traits>
__device__ __forceinline__ void store_later(const RowGemmParams& params,
                                            const RowGemmShared<Traits>& shared, const Tile& tile,
                                            const RoundedTile<Traits>& rounded) {
  static_assert(Traits::kBlocks == 1);
  const int index = ptx::thread_index();
  const int consumer = index / kWarpgroupThreads - 1;
  const int thread = index % kWarpgroupThreads;
  const int lane = thread % kWarpSize;
  const int barrier = barrier_id(NamedBarrier::kStore, consumer);
  const int rows = ptx::uniform(tile.rows);
  const int column = tile.feature + consumer * Traits::kConsumerStep;
  std::byte* const staging = shared.staging(consumer);
  const int write_offset =
      swizzle_128b(lane % 8 + lane / 16 * 8, thread / kWarpSize * 2 + lane / 8 % 2);
#pragma unroll
  for (int first = 0; first < Traits::kRows; first += Traits::kStagingRows) {
    if (first >= rows) break;
    if (thread == 0) ptx::cp_async_bulk_wait_group_read<0>();  // of the last rows in the buffer
    ptx::bar_sync(barrier, kWarpgroupThreads);
#pragma unroll
    for (int group = first; group < first + Traits::kStagingRows && group < Traits::kRows;
         group += 16) {
      if (group >= rows) break;
      std::byte* const at = staging + (group - first) * kRowBytes;
      const auto* pairs = rounded.pairs[0] + group / 4;
      if constexpr (Traits::kFeaturePairs) {
        stage_feature_pairs<Traits>(at, 16, thread / kWarpSize, lane,
                                    [&](int i) { return pairs[i]; });
      } else {
        ptx::stmatrix_x4_trans(ptx::shared_address(at) + write_offset, pairs[0], pairs[1], pairs[2],
                               pairs[3]);
      }
    }
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(barrier, kWarpgroupThreads);
    const int end = min(rows - first, Traits::kStagingRows);
    const int boxed = end / kStagedRows * kStagedRows;
    if (thread == 0) {
#pragma unroll 1
      for (int row = 0; row < boxed; row += kStagedRows) {
        ptx::cp_async_bulk_tensor_store_3d(&params.out_map, column, tile.row + first + row, 0,
                                           staging + row * kRowBytes);
      }
      ptx::cp_async_bulk_commit_group();
    }
#pragma unroll 1
    for (int row = boxed + thread / 8; row < end; row += kWarpgroupThreads / 8) {
      const auto value = *reinterpret_cast<const uint4*>(staging + swizzle_128b(row, thread % 8));
      store_chunk<typename Traits::Element>(params, tile.row + first + row, column + thread % 8 * 8,
                                            value);
    }
  }
}

/// One row of the output, by a whole warp.
template <typename T, int RowGemmParams::*Columns = &RowGemmParams::features>
__device__ __forceinline__ void zero_row(const RowGemmParams& params, int row) {
  const int lane = threadIdx.x % kWarpSize;
  if (sizeof(T) == 4 || params.out_is_fp32) {
    float* line = static_cast<float*>(params.out) + row * params.out_stride;
    for (int column = lane; column < params.*Columns; column += kWarpSize) line[column] = 0.0f;
  } else {
    for (int column = lane * 8; column < params.*Columns; column += kWarpSize * 8) {
      store_chunk<T, Columns>(params, row, column, uint4{});
    }
  }
}

}  // namespace moegemm::cuda::sm90
