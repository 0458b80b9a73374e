#pragma once

#include "cuda/device/expert_order.cuh"
#include "cuda/device/tile_scheduler.cuh"
#include "cuda/sm80/tile/chunk_copy.cuh"
#include "cuda/sm80/tile/operand_tile.h"
#include "cuda/sm80/tile/router_weight.cuh"
#include "cuda/sm80/weight/weight_gemm_params.h"

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
        queue_(params.counter, schedules() ? params.experts * params.tiling.per_expert() : 0) {}

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

  /// At the end, by all threads that copy.
  __device__ __forceinline__ void leave() {
    if (threadIdx.x == Shape::kFirstCopyThread) queue_.leave();
  }

  /// The first warp that copies decodes tiles.
  static __device__ __forceinline__ bool schedules() {
    return threadIdx.x / kWarpSize == Shape::kFirstCopyThread / kWarpSize;
  }

 private:
  const WeightGemmParams& params_;
  const ExpertTable& table_;
  TileQueue queue_;
};

/// Blocks of depth of a tile. Of an expert without rows: one, of zeros.
template <typename Traits>
__device__ __forceinline__ int depth_blocks(const WeightTile& tile) {
  return max(1, ceil_div(tile.rows, Traits::kDepth));
}

/// Where a row begins, in bytes from an operand's first row; negative: it reads as zeros.
struct RowOffsets {
  std::int64_t dy;
  std::int64_t x;
};

/// The rows of two blocks of depth, written one block ahead.
template <typename Traits>
struct RowTable {
  RowOffsets rows[2][Traits::kDepth];
};

/// One thread's share of the copies: a 16-byte chunk of every kStep-th row, of dY and of X.
///
/// Rows are looked up once for all threads: one thread for each row of a block fetches its index
/// two blocks ahead, of the next tile too, and writes its offsets one block ahead. Done by every
/// thread for its own chunks, this took 40 % of the kernel's time.
template <typename Traits>
class WeightLoader {
  using Shape = typename Traits::Shape;
  static constexpr int kChunks = Traits::kABytes / kChunkBytes;
  static constexpr int kStep = Shape::kThreads / kChunks;
  static constexpr int kPasses = Traits::kDepth / kStep;
  static_assert(Shape::kRows == Shape::kCols, "a thread copies the same rows of both operands");
  static_assert(Traits::kDepth % kStep == 0 && kStep % (Traits::kElementBytes == 2 ? 8 : 4) == 0);
  static_assert(Traits::kDepth <= Shape::kThreads);
  static constexpr int kStepBytes = kStep * Traits::kABytes;
  static constexpr int kNoRow = 0x7fffffff;

 public:
  __device__ __forceinline__ WeightLoader(const WeightGemmParams& params, const WeightTile* tiles,
                                          RowTable<Traits>& table, float* scales)
      : params_(params), tiles_(tiles), table_(table), scales_(scales) {}

  /// Before the first load, when the first tiles are decoded; a barrier must follow.
  __device__ __forceinline__ void prepare() {
    if (!looks_up()) return;
    fetch_next();
    write_fetched();
    fetch_next();
  }

  __device__ __forceinline__ int start(const WeightTile& tile) {
    const int chunk = threadIdx.x % kChunks * Traits::kChunkElements;
    dy_ = params_.dy + static_cast<std::int64_t>(tile.n + chunk) * Traits::kElementBytes;
    x_ = params_.x + static_cast<std::int64_t>(tile.k + chunk) * Traits::kElementBytes;
    n_left_ = params_.n - tile.n - chunk;
    k_left_ = params_.out.cols - tile.k - chunk;
    return depth_blocks<Traits>(tile);
  }

  static __device__ __forceinline__ void begin_load(std::uint32_t, int) {}

  /// Copies part `part` of `Parts` of the next block of depth, every part some rows of both
  /// operands. There is no branch, so that copies mingle with multiplications.
  template <int Parts>
  __device__ __forceinline__ void load_part(std::uint32_t stage, int part, int) const {
    static_for<Parts>([&]<int I>() {
      if (part == I) load_rows<I * kPasses / Parts, (I + 1) * kPasses / Parts>(stage);
    });
  }

  __device__ __forceinline__ void end_load(int slot) {
    half_ ^= 1;
    if (!looks_up()) return;
    if (params_.multiply) scales_[slot * Traits::kDepth + threadIdx.x] = scale_;
    write_fetched();
    fetch_next();
  }

  /// There are no more tiles. Nothing to do: their rows are missing from the table.
  static __device__ __forceinline__ void stop() {}

  __device__ __forceinline__ const float* scales(int slot) const {
    return params_.multiply ? scales_ + slot * Traits::kDepth : nullptr;
  }

 private:
  static __device__ __forceinline__ int own_row() { return threadIdx.x / kChunks; }
  static __device__ __forceinline__ bool looks_up() { return threadIdx.x < Traits::kDepth; }

  template <int First, int End>
  __device__ __forceinline__ void load_rows(std::uint32_t stage) const {
    constexpr int kCount = End - First;
    const std::uint32_t target = stage + outer_major_offset<Traits::kABytes, Traits::kElementBytes>(
                                             own_row(), threadIdx.x % kChunks);
    RowOffsets rows[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) rows[i] = table_.rows[half_][own_row() + (First + i) * kStep];
    copy_chunks<Traits, kCount>([&](int i) { return target + (First + i) * kStepBytes; },
                                [&](int i) { return dy_ + rows[i].dy; },
                                [&](int i) { return rows[i].dy >= 0 ? n_left_ : 0; });
    copy_chunks<Traits, kCount>(
        [&](int i) { return target + Shape::kRowsBytes + (First + i) * kStepBytes; },
        [&](int i) { return x_ + rows[i].x; }, [&](int i) { return rows[i].x >= 0 ? k_left_ : 0; });
  }

  /// The index of this thread's row in the block after the last one fetched.
  __device__ __forceinline__ void fetch_next() {
    fetched_ = {};
    if (ahead_blocks_ == 0) {
      const WeightTile& next = tiles_[(ahead_tile_ + 1) % kTileSlots];
      if (next.is_end()) {
        ahead_row_ = kNoRow;
        return;
      }
      ++ahead_tile_;
      ahead_blocks_ = depth_blocks<Traits>(next);
      ahead_row_ = next.row + threadIdx.x;
    } else {
      ahead_row_ += Traits::kDepth;
    }
    --ahead_blocks_;
    if (params_.indexed && is_ahead_inside()) fetched_ = params_.gather_indices.fetch(ahead_row_);
  }

  __device__ __forceinline__ bool is_ahead_inside() const {
    const WeightTile& tile = tiles_[ahead_tile_ % kTileSlots];
    return ahead_row_ < tile.row + tile.rows;
  }

  /// Rows past the segment and absent ones are missing in both operands: 0 times a NaN opposite
  /// would not be 0.
  __device__ __forceinline__ void write_fetched() {
    const int flat = fetched_.below(params_.flat_rows);
    const bool present = params_.indexed ? flat >= 0 : ahead_tile_ >= 0 && is_ahead_inside();
    const int row = present ? ahead_row_ : -1;
    const int source =
        flat < 0 ? -1 : static_cast<int>(params_.divisor.divide(static_cast<unsigned>(flat)));
    const int dy_row = params_.gather_dy ? source : row;
    const int x_row = params_.gather_x ? source : row;
    // A negative row stays negative.
    table_.rows[half_][threadIdx.x] = {dy_row * params_.dy_pitch.bytes(),
                                       x_row * params_.x_pitch.bytes()};
    if (params_.multiply) {
      scale_ = flat < 0 ? 0.0f
                        : router_weight<typename Traits::Element>(params_.topk_weights,
                                                                  params_.weights_are_fp32, flat);
    }
  }

  const WeightGemmParams& params_;
  const WeightTile* tiles_;
  RowTable<Traits>& table_;
  float* scales_;
  const std::byte* dy_;  ///< this thread's columns of the first row
  const std::byte* x_;
  int n_left_;  ///< columns from this thread's first on
  int k_left_;
  int half_ = 0;  ///< of the table, for the next block to load
  // Threads that look up rows:
  IndexArray::Fetched fetched_;
  float scale_;  ///< of the block to load
  int ahead_tile_ = -1;
  int ahead_blocks_ = 0;    ///< of that tile, after the fetched one
  int ahead_row_ = kNoRow;  ///< whose index was fetched
};

}  // namespace moegemm::cuda::sm80
