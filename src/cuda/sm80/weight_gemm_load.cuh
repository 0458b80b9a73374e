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

/// Where the rows of one gathered block of depth begin, in bytes from the operand's first row;
/// negative: reads as zeros. Two blocks, written one ahead.
template <typename Traits>
struct GatherTable {
  std::int64_t offsets[2][Traits::kDepth];
};

/// One thread's share of the copies: a 16-byte chunk of every kStep-th row, of dY and of X.
///
/// Rows of a gathered operand are looked up once for all threads: one thread for each row of a
/// block fetches its index two blocks ahead, of the next tile too, and writes its offset one block
/// ahead. Done by every thread for its own chunks, this cost 40 % of the kernel's time.
template <typename Traits>
class WeightLoader {
  using Shape = typename Traits::Shape;
  static constexpr int kChunks = Traits::kABytes / kChunkBytes;
  static constexpr int kStep = Shape::kThreads / kChunks;
  static constexpr int kPasses = Traits::kDepth / kStep;
  static_assert(Shape::kRows == Shape::kCols, "a thread copies the same rows of both operands");
  static_assert(Traits::kDepth % kStep == 0 && kStep % (Traits::kElementBytes == 2 ? 8 : 4) == 0);
  static_assert(Traits::kDepth <= Shape::kThreads);

 public:
  __device__ __forceinline__ WeightLoader(const WeightGemmParams& params, const WeightTile* tiles,
                                          GatherTable<Traits>& table, float* scales)
      : params_(params), tiles_(tiles), table_(table), scales_(scales) {}

  /// Before the first load, when the first tiles are decoded; a barrier must follow.
  __device__ __forceinline__ void prepare() {
    if (!gathers()) return;
    fetch_next();
    write_next();
    fetch_next();
  }

  __device__ __forceinline__ int start(const WeightTile& tile) {
    const int chunk = threadIdx.x % kChunks * Traits::kChunkElements;
    rows_left_ = tile.rows - own_row();
    const std::int64_t first = params_.gather_dy ? 0 : tile.row + own_row();
    dy_ = params_.dy + first * params_.dy_bytes +
          static_cast<std::int64_t>(tile.n + chunk) * Traits::kElementBytes;
    const std::int64_t first_x = params_.gather_x ? 0 : tile.row + own_row();
    x_ = params_.x + first_x * params_.x_bytes +
         static_cast<std::int64_t>(tile.k + chunk) * Traits::kElementBytes;
    n_left_ = params_.n - tile.n - chunk;
    k_left_ = params_.out.cols - tile.k - chunk;
    return blocks_of(tile);
  }

  __device__ __forceinline__ void load(std::uint32_t stage, int slot) {
    const std::uint32_t target = stage + outer_major_offset<Traits::kABytes, Traits::kElementBytes>(
                                             own_row(), threadIdx.x % kChunks);
    if (params_.gather_dy) {
      copy_gathered(target, dy_, n_left_);
    } else {
      copy_in_order(target, dy_, params_.dy_bytes, n_left_);
      dy_ += std::uint64_t{Traits::kDepth} * params_.dy_bytes;
    }
    if (params_.gather_x) {
      copy_gathered(target + Shape::kRowsBytes, x_, k_left_);
    } else {
      copy_in_order(target + Shape::kRowsBytes, x_, params_.x_bytes, k_left_);
      x_ += std::uint64_t{Traits::kDepth} * params_.x_bytes;
    }
    rows_left_ -= Traits::kDepth;
    if (!gathers()) return;
    if (params_.multiply && looks_up()) scales_[slot * Traits::kDepth + threadIdx.x] = scale_;
    write_next();
    fetch_next();
  }

  __device__ __forceinline__ const float* scales(int slot) const {
    return params_.multiply ? scales_ + slot * Traits::kDepth : nullptr;
  }

  static __device__ __forceinline__ int blocks_of(const WeightTile& tile) {
    return max(1, ceil_div(tile.rows, Traits::kDepth));
  }

 private:
  static __device__ __forceinline__ int own_row() { return threadIdx.x / kChunks; }
  static __device__ __forceinline__ bool looks_up() { return threadIdx.x < Traits::kDepth; }
  __device__ __forceinline__ bool gathers() const { return params_.gather_dy || params_.gather_x; }

  /// Rows past the segment are zeros in both operands: 0 times a neighbour's NaN would not be 0.
  __device__ __forceinline__ void copy_in_order(std::uint32_t target, const std::byte* source,
                                                unsigned pitch, int cols_left) const {
    copy_chunks<Traits, kPasses, kStep * Traits::kABytes>(
        target, [&](int i) { return source + std::uint64_t{pitch} * (i * kStep); },
        [&](int i) { return i * kStep < rows_left_ ? cols_left : 0; });
  }

  __device__ __forceinline__ void copy_gathered(std::uint32_t target, const std::byte* source,
                                                int cols_left) const {
    std::int64_t offsets[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) offsets[i] = table_.offsets[half_][own_row() + i * kStep];
    copy_chunks<Traits, kPasses, kStep * Traits::kABytes>(
        target, [&](int i) { return source + offsets[i]; },
        [&](int i) { return offsets[i] >= 0 ? cols_left : 0; });
  }

  /// Fetches this thread's index of the block after the last one fetched.
  __device__ __forceinline__ void fetch_next() {
    if (!looks_up()) return;
    fetched_ = {};
    if (ahead_blocks_ == 0) {
      const WeightTile& next = tiles_[(ahead_tile_ + 1) % kTileSlots];
      if (next.is_end()) return;
      ++ahead_tile_;
      ahead_blocks_ = blocks_of(next);
      ahead_row_ = next.row + threadIdx.x;
      ahead_end_ = next.row + next.rows;
    }
    if (ahead_row_ < ahead_end_) fetched_ = params_.gather_indices.fetch(ahead_row_);
    --ahead_blocks_;
    ahead_row_ += Traits::kDepth;
  }

  /// Writes the offset that belongs to the fetched index, for the next block.
  __device__ __forceinline__ void write_next() {
    half_ ^= 1;
    if (!looks_up()) return;
    const int flat = fetched_.below(params_.total_rows);
    const unsigned pitch = params_.gather_dy ? params_.dy_bytes : params_.x_bytes;
    const unsigned row = params_.divisor.divide(static_cast<unsigned>(max(flat, 0)));
    table_.offsets[half_][threadIdx.x] =
        flat < 0 ? -1 : static_cast<std::int64_t>(std::uint64_t{row} * pitch);
    if (params_.multiply) {
      scale_ = flat < 0 ? 0.0f
                        : router_weight<typename Traits::Element>(params_.topk_weights,
                                                                  params_.weights_are_fp32, flat);
    }
  }

  const WeightGemmParams& params_;
  const WeightTile* tiles_;
  GatherTable<Traits>& table_;
  float* scales_;
  const std::byte* dy_;  ///< this thread's columns; its first row of the block, or row 0
  const std::byte* x_;
  int n_left_;  ///< columns from this thread's first on
  int k_left_;
  int rows_left_;  ///< of the segment, from this thread's first row of the block on
  int half_ = 1;   ///< of the table, for the block to load
  // Threads that look up rows:
  IndexArray::Fetched fetched_;
  float scale_;  ///< of the block to load
  int ahead_tile_ = -1;
  int ahead_blocks_ = 0;
  int ahead_row_ = 0;
  int ahead_end_ = 0;
};

}  // namespace moegemm::cuda::sm80
