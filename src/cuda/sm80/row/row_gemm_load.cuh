#pragma once

#include "cuda/device/tile_scheduler.cuh"
#include "cuda/sm80/row/row_gemm_params.h"
#include "cuda/sm80/tile/chunk_copy.cuh"
#include "cuda/sm80/tile/operand_tile.h"

/// What the row kernels load, and in which order their tiles come.
namespace moegemm::cuda::sm80 {

struct RowTile : moegemm::cuda::Tile {
  __device__ __forceinline__ bool is_end() const { return rows == 0; }
};

/// Tiles of all experts, from the queue that all blocks share.
template <typename Shape>
class RowScheduler {
 public:
  using Tile = RowTile;

  __device__ __forceinline__ RowScheduler(const RowGemmParams& params, const SegmentStart* starts)
      : params_(params),
        queue_(params.counter, threadIdx.x < kWarpSize ? starts[params.experts].tile : 0),
        decoder_(starts, params.experts) {}

  __device__ __forceinline__ Tile decode() {
    if (queue_.done()) return {};
    const Tile tile = {
        decoder_.template decode<Shape::kRows, Shape::kGranule, Shape::kCols>(queue_.current())};
    queue_.advance();
    prefetch_indices(tile);
    return tile;
  }

  /// At the end, by all threads.
  __device__ __forceinline__ void leave() {
    if (threadIdx.x == 0) queue_.leave();
  }

 private:
  /// A block waits for its indices when it starts to load a tile: let that be from L2.
  __device__ __forceinline__ void prefetch_indices(const Tile& tile) const {
    if (!params_.gather && !params_.scatter) return;
    const int index_bytes = params_.gather_indices.is_64_bit ? 8 : 4;
    const int offset = threadIdx.x * 128;
    if (offset < tile.rows * index_bytes) {
      ptx::prefetch_l2(static_cast<const std::byte*>(params_.gather_indices.data) +
                       static_cast<std::int64_t>(tile.row) * index_bytes + offset);
    }
  }

  const RowGemmParams& params_;
  TileQueue queue_;
  TileDecoder decoder_;
};

/// One thread's share of a row kernel's copies: a 16-byte chunk of every kRowStep-th row, and the
/// same of the weights, or of every kDepthStep-th depth where the weights' features are contiguous.
template <typename Traits>
class RowLoader {
  using Shape = typename Traits::Shape;
  static constexpr bool kDepthMajor = Traits::kBMajor == Major::kDepth;
  static constexpr int kChunks = Shape::kDepthBytes / kChunkBytes;
  static constexpr int kRowStep = Shape::kThreads / kChunks;
  static constexpr int kRowPasses = Shape::kRows / kRowStep;
  static constexpr int kColChunks = Traits::kBBytes / kChunkBytes;
  static constexpr int kDepthStep = Shape::kThreads / kColChunks;
  static constexpr int kWeightPasses =
      kDepthMajor ? Shape::kCols / kRowStep : Traits::kDepth / kDepthStep;
  static constexpr unsigned kFirstColumn = 1u << 16;
  /// What of valid_ ends with the contraction.
  static constexpr unsigned kRowBits = kDepthMajor ? ~0u : kFirstColumn - 1;
  static_assert(kRowPasses <= 16 && kWeightPasses <= 16);
  static_assert(Shape::kRows % kRowStep == 0 && Shape::kCols % kRowStep == 0);
  static_assert(Traits::kDepth % kDepthStep == 0 && kDepthStep % 4 == 0);
  // The swizzle of a thread's chunk does not depend on the pass.
  static_assert(kRowStep % 8 == 0 && (Traits::kElementBytes == 4 || kDepthStep % 8 == 0));

 public:
  __device__ __forceinline__ explicit RowLoader(const RowGemmParams& params) : params_(params) {}

  static __device__ __forceinline__ void prepare() {}

  __device__ __forceinline__ int start(const RowTile& tile) {
    depth_left_ = params_.depth;
    locate_rows(tile);
    const std::byte* expert = params_.weights + tile.expert * params_.expert_bytes;
    if constexpr (kDepthMajor) {
      weights_ =
          expert + (tile.feature + own_row()) * params_.weight_bytes + own_chunk() * kChunkBytes;
      cols_left_ = params_.out.cols - tile.feature - own_row();
    } else {
      const int feature = tile.feature + own_col_chunk() * Traits::kChunkElements;
      weights_ = expert + own_depth() * params_.weight_bytes +
                 static_cast<std::int64_t>(feature) * Traits::kElementBytes;
      cols_left_ = params_.out.cols - feature;
    }
#pragma unroll
    for (int i = 0; i < (kDepthMajor ? kWeightPasses : 1); ++i) {
      if (i * kRowStep < cols_left_) valid_ |= kFirstColumn << i;
    }
    return ceil_div(params_.depth, Traits::kDepth);
  }

  __device__ __forceinline__ void begin_load() {
    const int inside = depth_left_ - own_chunk() * Traits::kChunkElements;
    if (inside <= 0) valid_ &= ~kRowBits;  // the tile's last block
  }

  /// Copies part `part` of `Parts` of the next block of depth; the first parts are rows, the others
  /// weights. There is no branch, so that copies mingle with multiplications.
  template <int Parts>
  __device__ __forceinline__ void load_part(std::uint32_t stage, int part) const {
    static_assert(Parts == 1 || Parts % 2 == 0);
    constexpr int kHalf = Parts == 1 ? 1 : Parts / 2;
    static_for<kHalf>([&]<int I>() {
      if (Parts == 1 || part == I) load_rows<I * kRowPasses / kHalf, kRowPasses / kHalf>(stage);
      if (Parts == 1 || part == kHalf + I) {
        load_weights<I * kWeightPasses / kHalf, kWeightPasses / kHalf>(stage + Shape::kRowsBytes);
      }
    });
  }

  __device__ __forceinline__ void end_load(int) {
    base_ += Shape::kDepthBytes;
    weights_ += kDepthMajor ? Shape::kDepthBytes : Traits::kDepth * params_.weight_bytes;
    depth_left_ -= Traits::kDepth;
  }

  /// There are no more tiles: further loads copy zeros.
  __device__ __forceinline__ void stop() { valid_ = 0; }

  static __device__ __forceinline__ const float* scales(int) { return nullptr; }

 private:
  static __device__ __forceinline__ int own_chunk() { return threadIdx.x % kChunks; }
  static __device__ __forceinline__ int own_row() { return threadIdx.x / kChunks; }
  static __device__ __forceinline__ int own_col_chunk() { return threadIdx.x % kColChunks; }
  static __device__ __forceinline__ int own_depth() { return threadIdx.x / kColChunks; }

  __device__ __forceinline__ void locate_rows(const RowTile& tile) {
    base_ = params_.rows + own_chunk() * kChunkBytes;
    valid_ = 0;
    if (!params_.gather) {
#pragma unroll
      for (int i = 0; i < kRowPasses; ++i) {
        const int row = own_row() + i * kRowStep;
        if (row < tile.rows) valid_ |= 1u << i;
        rows_[i] = static_cast<unsigned>(tile.row + row);
      }
      return;
    }
    IndexArray::Fetched fetched[kRowPasses];  // all loads in flight before the first use
#pragma unroll
    for (int i = 0; i < kRowPasses; ++i) {
      const int row = own_row() + i * kRowStep;
      if (row < tile.rows) fetched[i] = params_.gather_indices.fetch(tile.row + row);
    }
#pragma unroll
    for (int i = 0; i < kRowPasses; ++i) {
      const int flat = fetched[i].below(params_.total_rows);
      if (flat >= 0) valid_ |= 1u << i;
      rows_[i] = params_.divisor.divide(static_cast<unsigned>(max(flat, 0)));
    }
  }

  /// How many elements of a chunk exist, if any does.
  static __device__ __forceinline__ int existing(int left) {
    return Traits::kLoads == Loads::kVectors ? Traits::kChunkElements : left;
  }

  template <int First, int Passes>
  __device__ __forceinline__ void load_rows(std::uint32_t stage) const {
    const int inside = existing(depth_left_ - own_chunk() * Traits::kChunkElements);
    copy_chunks<Traits, First, Passes, kRowStep * Shape::kDepthBytes>(
        stage + depth_major_offset<Shape::kDepthBytes>(own_row(), own_chunk()),
        [&](int i) { return base_ + std::uint64_t{rows_[i]} * params_.row_bytes; },
        [&](int i) { return valid_ & 1u << i ? inside : 0; });
  }

  template <int First, int Passes>
  __device__ __forceinline__ void load_weights(std::uint32_t stage) const {
    if constexpr (kDepthMajor) {
      const int inside = existing(depth_left_ - own_chunk() * Traits::kChunkElements);
      copy_chunks<Traits, First, Passes, kRowStep * Shape::kDepthBytes>(
          stage + depth_major_offset<Shape::kDepthBytes>(own_row(), own_chunk()),
          [&](int i) { return weights_ + i * kRowStep * params_.weight_bytes; },
          [&](int i) { return valid_ & kFirstColumn << i ? inside : 0; });
    } else {
      const int depths = valid_ & kFirstColumn ? depth_left_ - own_depth() : 0;
      copy_chunks<Traits, First, Passes, kDepthStep * Traits::kBBytes>(
          stage + outer_major_offset<Traits::kBBytes, Traits::kElementBytes>(own_depth(),
                                                                             own_col_chunk()),
          [&](int i) { return weights_ + i * kDepthStep * params_.weight_bytes; },
          [&](int i) { return i * kDepthStep < depths ? existing(cols_left_) : 0; });
    }
  }

  const RowGemmParams& params_;
  const std::byte* base_;  ///< this thread's chunk of row 0, at the block to load
  unsigned rows_[kRowPasses];
  const std::byte* weights_;
  unsigned valid_;  ///< bit i: the row of pass i exists; from kFirstColumn on: the weights' column
  int cols_left_;   ///< features from the first that this thread loads on
  int depth_left_;  ///< of the contraction, from this block on
};

}  // namespace moegemm::cuda::sm80
