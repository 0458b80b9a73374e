#pragma once

#include "cuda/device/expert_order.cuh"
#include "cuda/device/tile_scheduler.cuh"
#include "cuda/sm80/chunk_copy.cuh"
#include "cuda/sm80/operand_tile.h"
#include "cuda/sm80/router_weight.cuh"
#include "cuda/sm80/weight_gemm_params.h"

/// What the dW kernels load, and in which order their tiles come.
namespace moegemm::cuda::sm80 {

/// Row prefix sums and the order of the experts, in shared memory.
struct ExpertTable {
  int* row_prefix;        ///< [E + 1]
  unsigned short* order;  ///< [E]: experts, large ones first
};

/// Tiles of all experts, those of large experts first.
template <typename Shape>
class WeightScheduler {
 public:
  using Tile = WeightTile;

  __device__ __forceinline__ WeightScheduler(const WeightGemmParams& params,
                                             const ExpertTable& table)
      : params_(params),
        table_(table),
        queue_(params.counter,
               threadIdx.x < kWarpSize ? params.experts * params.tiling.per_expert() : 0) {}

  __device__ __forceinline__ Tile decode() {
    for (; !queue_.done(); queue_.advance()) {
      Tile tile = decode_weight_tile(queue_.current(), params_.tiling, Shape::kRows, Shape::kCols);
      tile.expert = table_.order[tile.expert];
      tile.row = table_.row_prefix[tile.expert];
      tile.rows = table_.row_prefix[tile.expert + 1] - tile.row;
      // dW += nothing: left alone, so that not even -0.0 changes.
      if (tile.rows == 0 && params_.out.accumulate) continue;
      queue_.advance();
      return tile;
    }
    return {};
  }

  /// At the end, by all threads.
  __device__ __forceinline__ void leave() {
    if (threadIdx.x == 0) queue_.leave();
  }

 private:
  const WeightGemmParams& params_;
  const ExpertTable& table_;
  TileQueue queue_;
};

/// One thread's share of the copies: a 16-byte chunk of every kStep-th row, of dY and of X.
template <typename Traits>
class WeightLoader {
  using Shape = typename Traits::Shape;
  static constexpr int kChunks = Traits::kABytes / kChunkBytes;
  static constexpr int kStep = Shape::kThreads / kChunks;
  static constexpr int kPasses = Traits::kDepth / kStep;
  static_assert(Shape::kRows == Shape::kCols, "a thread copies the same rows of both operands");
  static_assert(Traits::kDepth % kStep == 0 && kStep % (Traits::kElementBytes == 2 ? 8 : 4) == 0);

 public:
  __device__ __forceinline__ WeightLoader(const WeightGemmParams& params, float* scales)
      : params_(params), scales_(scales) {}

  __device__ __forceinline__ int start(const WeightTile& tile) {
    const int chunk = threadIdx.x % kChunks * Traits::kChunkElements;
    row_ = tile.row + own_row();
    rows_left_ = tile.rows - own_row();
    dy_ = params_.dy + static_cast<std::int64_t>(tile.n + chunk) * Traits::kElementBytes;
    x_ = params_.x + static_cast<std::int64_t>(tile.k + chunk) * Traits::kElementBytes;
    n_left_ = params_.n - tile.n - chunk;
    k_left_ = params_.out.cols - tile.k - chunk;
    fetch_indices();
    return max(1, ceil_div(tile.rows, Traits::kDepth));
  }

  __device__ __forceinline__ void load(std::uint32_t stage, int slot) {
    // Rows past the segment are zeros in both operands: 0 times a neighbour's NaN would not be 0.
    unsigned dy_rows[kPasses];
    unsigned x_rows[kPasses];
    unsigned missing_dy = 0;
    unsigned missing_x = 0;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const bool outside = i * kStep >= rows_left_;
      const int flat = fetched_[i].below(params_.total_rows);
      const unsigned source = params_.divisor.divide(static_cast<unsigned>(max(flat, 0)));
      const unsigned row = outside ? 0 : static_cast<unsigned>(row_ + i * kStep);
      dy_rows[i] = params_.gather_dy ? source : row;
      x_rows[i] = params_.gather_x ? source : row;
      if (outside || (params_.gather_dy && flat < 0)) missing_dy |= 1u << i;
      if (outside || (params_.gather_x && flat < 0)) missing_x |= 1u << i;
    }
    const int offset = outer_major_offset<Traits::kABytes, Traits::kElementBytes>(
        own_row(), threadIdx.x % kChunks);
    copy_chunks<Traits, kPasses, kStep * Traits::kABytes>(
        stage + offset, [&](int i) { return dy_ + std::uint64_t{dy_rows[i]} * params_.dy_bytes; },
        [&](int i) { return missing_dy >> i & 1 ? 0 : n_left_; });
    copy_chunks<Traits, kPasses, kStep * Traits::kBBytes>(
        stage + Shape::kRowsBytes + offset,
        [&](int i) { return x_ + std::uint64_t{x_rows[i]} * params_.x_bytes; },
        [&](int i) { return missing_x >> i & 1 ? 0 : k_left_; });
    if (params_.multiply) load_scales(slot);
    row_ += Traits::kDepth;
    rows_left_ -= Traits::kDepth;
    fetch_indices();
  }

  __device__ __forceinline__ const float* scales(int slot) const {
    return params_.multiply ? scales_ + slot * Traits::kDepth : nullptr;
  }

 private:
  static __device__ __forceinline__ int own_row() { return threadIdx.x / kChunks; }

  /// Of the next block, while this one's copies are on their way.
  __device__ __forceinline__ void fetch_indices() {
    if (!params_.gather_dy && !params_.gather_x) return;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      fetched_[i] = {};
      if (i * kStep < rows_left_) fetched_[i] = params_.gather_indices.fetch(row_ + i * kStep);
    }
  }

  /// The scales of this block's rows, one thread each.
  __device__ __forceinline__ void load_scales(int slot) const {
    if (threadIdx.x >= Traits::kDepth) return;
    const int ahead = static_cast<int>(threadIdx.x) - own_row();  // from this thread's first row
    float scale = 0.0f;
    if (ahead < rows_left_) {
      const int flat = flat_row(params_.gather_indices, row_ + ahead, params_.total_rows);
      if (flat >= 0) {
        scale = router_weight<typename Traits::Element>(params_.topk_weights,
                                                        params_.weights_are_fp32, flat);
      }
    }
    scales_[slot * Traits::kDepth + threadIdx.x] = scale;
  }

  const WeightGemmParams& params_;
  float* scales_;
  const std::byte* dy_;  ///< this thread's columns, row 0
  const std::byte* x_;
  int n_left_;  ///< columns from this thread's first on
  int k_left_;
  int row_;        ///< this thread's first row of the block
  int rows_left_;  ///< of the segment, from that row on
  IndexArray::Fetched fetched_[kPasses];
};

}  // namespace moegemm::cuda::sm80
