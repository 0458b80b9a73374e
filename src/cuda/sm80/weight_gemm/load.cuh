#pragma once

#include "cuda/device/schedule/expert_order.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/sm80/tile/load.cuh"
#include "cuda/sm80/tile/pipeline.cuh"
#include "cuda/sm80/tile/stage.h"
#include "cuda/sm80/weight_gemm/params.h"

/// What the dW kernels load, and in which order their tiles come.
namespace moegemm::cuda::sm80 {

/// Tiles of all experts, those of large experts first.
template <typename Shape>
class WeightScheduler : public TileSource<Shape> {
  using TileSource<Shape>::queue_;

 public:
  using Tile = WeightTile;

  __device__ __forceinline__ WeightScheduler(const WeightGemmParams& params,
                                             const ExpertTable& table)
      : TileSource<Shape>(params.counter, TileSource<Shape>::schedules()
                                              ? params.experts * params.tiling.tiles_per_expert()
                                              : 0),
        params_(params),
        table_(table) {}

  __device__ __forceinline__ Tile decode() {
    for (; !queue_.done(); queue_.advance()) {
      Tile tile = decode_weight_tile(queue_.current(), params_.tiling, Shape::kRows, Shape::kCols);
      table_.place(tile, params_.placement);
      // dW += nothing: left alone, so that not even -0.0 changes.
      if (tile.rows == 0 && params_.out.accumulate) continue;
      queue_.advance();
      return tile;
    }
    return {};
  }

 private:
  const WeightGemmParams& params_;
  const ExpertTable& table_;
};

/// Blocks of depth of a tile. Of an expert without rows: one, of zeros.
template <typename Traits>
__device__ __forceinline__ int depth_blocks(const WeightTile& tile) {
  return max(1, ceil_div(tile.rows, Traits::kDepth));
}

/// The factor of a row of dY.
template <typename Element>
__device__ __forceinline__ float row_scale(const WeightGemmParams& params, int flat) {
  return flat < 0 ? 0.0f : params.router_weight<Element>(flat);
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

/// Calls f.operator()<0>() to f.operator()<Count - 1>().
template <int Count, int First = 0, typename Function>
__device__ __forceinline__ void static_for(const Function& f) {
  if constexpr (First < Count) {
    f.template operator()<First>();
    static_for<Count, First + 1>(f);
  }
}

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
  static constexpr int kXPasses = Shape::kCols / Shape::kRows;  ///< chunks of a row of X
  static_assert(Shape::kCols % Shape::kRows == 0, "a thread copies the same rows of both operands");
  static_assert(Traits::kDepth % kStep == 0 && kStep % (Traits::kElementBytes == 2 ? 8 : 4) == 0);
  static_assert(Traits::kDepth <= Shape::kThreads);
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
    dy_ = params_.dy + static_cast<std::int64_t>(tile.a_col + chunk) * Traits::kElementBytes;
    x_ = params_.x + static_cast<std::int64_t>(tile.b_col + chunk) * Traits::kElementBytes;
    n_left_ = params_.n - tile.a_col - chunk;
    k_left_ = params_.out.cols - tile.b_col - chunk;
    return depth_blocks<Traits>(tile);
  }

  static __device__ __forceinline__ void begin_load(std::uint32_t, int) {}

  /// Copies part `part` of `Parts` of the next block of depth, every part some rows of both
  /// operands. There is no branch, so that copies mingle with multiplications.
  template <int Parts>
  __device__ __forceinline__ void load_part(std::uint32_t stage, int part, int) const {
    constexpr int kParts = Parts < kPasses ? Parts : kPasses;
    static_for<kParts>([&]<int I>() {
      if (part == I) load_rows<I * kPasses / kParts, (I + 1) * kPasses / kParts>(stage);
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
    const std::uint32_t x_target = target + own_row() * (Traits::kBBytes - Traits::kABytes);
    RowOffsets rows[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) rows[i] = table_.rows[half_][own_row() + (First + i) * kStep];
    copy_chunks<Traits, kCount>(
        [&](int i) { return target + (First + i) * kStep * Traits::kABytes; },
        [&](int i) { return dy_ + rows[i].dy; },
        [&](int i) { return rows[i].dy >= 0 ? n_left_ : 0; });
#pragma unroll
    for (int pass = 0; pass < kXPasses; ++pass) {
      // As far apart as a row of dY is long: the swizzle is the same.
      copy_chunks<Traits, kCount>(
          [&](int i) {
            return x_target + Shape::kRowsBytes + (First + i) * kStep * Traits::kBBytes +
                   pass * Traits::kABytes;
          },
          [&](int i) { return x_ + rows[i].x + pass * Traits::kABytes; },
          [&](int i) { return rows[i].x >= 0 ? k_left_ - pass * Shape::kRows : 0; });
    }
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
    const int source = params_.source_row(flat);
    const int dy_row = params_.gather_dy ? source : row;
    const int x_row = params_.gather_x ? source : row;
    // A negative row stays negative.
    table_.rows[half_][threadIdx.x] = {dy_row * params_.dy_pitch.bytes(),
                                       x_row * params_.x_pitch.bytes()};
    if (params_.multiply) scale_ = row_scale<typename Traits::Element>(params_, flat);
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

/// One thread's share of the copies: a 16-byte chunk of some rows of dY and of X.
///
/// A warp copies every kLoadWarps-th row of a block of depth, in both operands, and looks these up
/// itself, one row in a lane: without factors, no warp waits for another. Its lanes hold the rows
/// of as many blocks as they have room for; the indices of the blocks after those are on their way.
template <typename Traits>
class WeightStreamLoader {
  using Shape = typename Traits::Shape;
  static constexpr int kOwnRows = Traits::kDepth / Shape::kLoadWarps;  ///< of a block
  static constexpr int kBlocks = kWarpSize / kOwnRows;                 ///< looked up at once
  static constexpr unsigned kNoRow = 0xffffffffu;                      ///< it reads as zeros
  static_assert(Traits::kLoads == Loads::kVectors && Traits::kElementBytes == 2);
  static_assert(kOwnRows * kBlocks == kWarpSize);

  /// How the lanes share the chunks of an operand: each pass is kRows of the warp's rows.
  template <int RowBytes>
  struct Share {
    static constexpr int kChunks = RowBytes / kChunkBytes;
    static constexpr int kRows = kWarpSize / kChunks;
    static constexpr int kPasses = kOwnRows / kRows;
    static_assert(kRows > 0 && kPasses <= kChunks);

    static __device__ __forceinline__ int chunk() { return lane_id() % kChunks; }
    static __device__ __forceinline__ int row() { return lane_id() / kChunks; }
    static __device__ __forceinline__ std::uint32_t first_target() {
      return outer_major_offset<RowBytes, Traits::kElementBytes>(warp() + row() * Shape::kLoadWarps,
                                                                 chunk());
    }
    static __device__ __forceinline__ std::uint32_t target(std::uint32_t first, int pass) {
      return outer_major_pass<RowBytes, Traits::kElementBytes, kRows * Shape::kLoadWarps>(first,
                                                                                          pass);
    }
  };
  using Dy = Share<Traits::kABytes>;
  using X = Share<Traits::kBBytes>;

 public:
  __device__ __forceinline__ WeightStreamLoader(const WeightGemmParams& params, float* scales)
      : params_(params),
        scales_(scales),
        dy_target_(ptx::keep(Dy::first_target())),
        x_target_(ptx::keep(X::first_target())) {}

  __device__ __forceinline__ int start(const WeightTile& tile) {
    const int n = tile.a_col + Dy::chunk() * Traits::kChunkElements;
    const int k = tile.b_col + X::chunk() * Traits::kChunkElements;
    dy_ = params_.dy + static_cast<std::int64_t>(n) * Traits::kElementBytes;
    x_ = params_.x + static_cast<std::int64_t>(k) * Traits::kElementBytes;
    n_exists_ = n < params_.n;
    k_exists_ = k < params_.out.cols;
    block_ = 0;
    position_ = tile.row + lane_id() / kOwnRows * Traits::kDepth + own_depth();
    end_ = tile.row + tile.rows;
    fetch();
    return depth_blocks<Traits>(tile);
  }

  __device__ __forceinline__ void load(std::uint32_t stage, int slot, int) {
    const int part = block_ % kBlocks;
    if (part == 0) look_up();
    ++block_;
    if (params_.multiply) {
      if (lane_id() / kOwnRows == part) scales_[slot * Traits::kDepth + own_depth()] = scale_;
      share_stores<Shape>();
    }
    const int first = part * kOwnRows;
    copy<Dy>(stage, dy_target_, dy_, params_.dy_pitch, dy_row_, first, n_exists_);
    copy<X>(stage + Shape::kRowsBytes, x_target_, x_, params_.x_pitch, x_row_, first, k_exists_);
  }

 private:
  static __device__ __forceinline__ int warp() {
    return (threadIdx.x - Shape::kFirstCopyThread) / kWarpSize;
  }
  /// Of the row that this lane looks up, in its block.
  static __device__ __forceinline__ int own_depth() {
    return warp() + lane_id() % kOwnRows * Shape::kLoadWarps;
  }

  /// The index of the row at position_, on its way.
  __device__ __forceinline__ void fetch() {
    fetched_ = {};
    if (params_.indexed && position_ < end_) {
      fetched_ = params_.gather_indices.fetch(position_);
    }
  }

  /// The rows that the fetched indices name: see WeightLoader::write_fetched.
  __device__ __forceinline__ void look_up() {
    const int flat = fetched_.below(params_.flat_rows);
    const int source = params_.source_row(flat);
    const bool present = params_.indexed ? flat >= 0 : position_ < end_;
    const int row = present ? position_ : -1;
    const auto in_units = [](unsigned row, const RowPitch& pitch) {
      return row == kNoRow ? kNoRow : row * pitch.units;
    };
    dy_row_ = in_units(params_.gather_dy ? source : row, params_.dy_pitch);
    x_row_ = in_units(params_.gather_x ? source : row, params_.x_pitch);
    if (params_.multiply) scale_ = row_scale<typename Traits::Element>(params_, flat);
    position_ += kBlocks * Traits::kDepth;
    fetch();
  }

  /// The rows of lanes `first` and following, kOwnRows of them.
  template <typename Share>
  static __device__ __forceinline__ void copy(std::uint32_t stage, std::uint32_t target,
                                              const std::byte* base, const RowPitch& pitch,
                                              unsigned rows, int first, bool exists) {
    // First to the lanes that copy the same rows, pass after pass.
    const int own = first + lane_id() % Share::kPasses * Share::kRows + Share::row();
    const unsigned own_rows = __shfl_sync(kFullMask, rows, own);
#pragma unroll
    for (int pass = 0; pass < Share::kPasses; ++pass) {
      const unsigned row = __shfl_sync(kFullMask, own_rows, pass, Share::kChunks);
      ptx::cp_async_16_or_zero(stage + Share::target(target, pass),
                               base + std::uint64_t{row} * pitch.unit_bytes,
                               exists && row != kNoRow);
    }
  }

  const WeightGemmParams& params_;
  float* scales_;                  ///< [stages][depth]
  const std::uint32_t dy_target_;  ///< where a stage takes this thread's first chunk
  const std::uint32_t x_target_;
  const std::byte* dy_;  ///< this thread's columns of the first row
  const std::byte* x_;
  bool n_exists_;
  bool k_exists_;
  int block_;     ///< of the tile, the next to load
  int position_;  ///< of this lane's row whose index is on its way
  int end_;       ///< of the segment
  IndexArray::Fetched fetched_;
  unsigned dy_row_;  ///< that this lane has looked up, in units of the pitch
  unsigned x_row_;
  float scale_;
};

}  // namespace moegemm::cuda::sm80
