#pragma once

#include "cuda/ptx/opaque.cuh"
#include "cuda/sm80/row_gemm/params.h"
#include "cuda/sm80/row_gemm/quantised.cuh"
#include "cuda/sm80/row_gemm/traits.h"
#include "cuda/sm80/tile/load.cuh"
#include "cuda/sm80/tile/pipeline.cuh"
#include "cuda/sm80/tile/stage.h"

/// What the row GEMMs load: the tiles of all experts, their rows and weights, and where results go.
namespace moegemm::cuda::sm80 {

struct RowTile : moegemm::cuda::Tile {
  __device__ __forceinline__ bool is_end() const { return rows == 0; }
};

/// Tiles of all experts, from the queue that all blocks share.
template <typename Shape>
class RowScheduler : public TileSource<Shape> {
  using TileSource<Shape>::queue_;

 public:
  using Tile = RowTile;

  __device__ __forceinline__ RowScheduler(const RowGemmParams& params, const SegmentStart* starts)
      : TileSource<Shape>(params.counter,
                          TileSource<Shape>::schedules() ? starts[params.experts].tile : 0),
        params_(params),
        starts_(starts),
        decoder_(starts, params.experts) {}

  __device__ __forceinline__ Tile decode() {
    if (queue_.done()) return {};
    const moegemm::cuda::Tile decoded =
        params_.full_first ? decode_full_first(queue_.current())
                           : decoder_.template decode<Shape::kRows, Shape::kGranule, Shape::kCols>(
                                 queue_.current());
    const Tile tile = {placed_tile(decoded, params_.placement, starts_)};
    queue_.advance();
    prefetch_indices(tile);
    return tile;
  }

 private:
  /// The lanes count the tiles of 32 experts at once.
  __device__ __forceinline__ moegemm::cuda::Tile decode_full_first(int number) const {
    const int lane = lane_id();
    const int feature_tiles = ceil_div(params_.out.cols, Shape::kCols);
    const auto rows = [&](int expert) { return starts_[expert + 1].row - starts_[expert].row; };
    int before = 0;  // tiles before those of the lanes' experts
#pragma unroll 1
    for (int base = 0, full = 1;; base += kWarpSize) {
      if (base >= params_.experts) {
        base = 0;
        full = 0;
      }
      const int own = base + lane < params_.experts
                          ? feature_tiles * tiles_in_part(full, rows(base + lane), Shape::kRows,
                                                          Shape::kGranule)
                          : 0;
      const int end = before + inclusive_scan(own, lane);
      const unsigned beyond = __ballot_sync(kFullMask, end > number);
      if (beyond != 0) {
        const int found = __ffs(beyond) - 1;
        const int first = __shfl_sync(kFullMask, end - own, found);
        return decode_tile_in_part(full, number - first, base + found, starts_[base + found].row,
                                   rows(base + found), Shape::kRows, Shape::kGranule, Shape::kCols);
      }
      before = __shfl_sync(kFullMask, end, kWarpSize - 1);
    }
  }

  /// A block waits for its indices when it starts to load a tile: let that be from L2.
  __device__ __forceinline__ void prefetch_indices(const Tile& tile) const {
    if (!params_.gather && !params_.scatter) return;
    const int index_bytes = params_.gather_indices.is_64_bit ? 8 : 4;
    const int offset = lane_id() * 128;
    if (offset < tile.rows * index_bytes) {
      ptx::prefetch_l2(static_cast<const std::byte*>(params_.gather_indices.data) +
                       static_cast<std::int64_t>(tile.row) * index_bytes + offset);
    }
  }

  const RowGemmParams& params_;
  const SegmentStart* starts_;
  TileDecoder decoder_;
};

/// One thread's share of a row GEMM's copies: a 16-byte chunk of every kRowStep-th row, and the
/// same of the weights. Where the weights' features are contiguous, chunks kColSpan apart of every
/// kDepthStep-th depth: those of a depth share an address, and the rest is constants.
///
/// A block of depth is regular if its tile has all its columns and good indices and it does not
/// reach past the end of the contraction: its copies carry no conditions but the tile's height.
/// What they read for rows past the tile's last, within its height, is a row of the tile: the
/// results are not stored. Anything else is copied chunk by chunk, with zeros for what does not
/// exist.
template <typename Traits>
class RowLoader {
  using Shape = typename Traits::Shape;
  static constexpr bool kDepthMajor = Traits::kBMajor == Major::kDepth;
  static constexpr int kChunks = Shape::kDepthBytes / kChunkBytes;
  static constexpr int kRowStep = Shape::kCopyThreads / kChunks;
  static constexpr int kRowPasses = Shape::kRows / kRowStep;
  static constexpr int kColChunks = Traits::kBBytes / kChunkBytes;
  /// Chunks of a depth that the threads copy at once: whole lines of 128 bytes.
  static constexpr int kColSpan =
      Shape::kCopyThreads / Traits::kDepth > 8 ? Shape::kCopyThreads / Traits::kDepth : 8;
  static constexpr int kColPasses = kDepthMajor ? 1 : kColChunks / kColSpan;
  static constexpr int kDepthStep = Shape::kCopyThreads / kColSpan;
  static constexpr int kWeightStep = kDepthMajor ? kRowStep : kDepthStep;  ///< rows of W
  static constexpr int kWeightRows = (kDepthMajor ? Shape::kCols : Traits::kDepth) / kWeightStep;
  static constexpr int kWeightPasses = kWeightRows * kColPasses;
  static constexpr unsigned kNoRow = 0xffffffffu;
  /// Which of a tile's features lies at a row of the stage.
  static __device__ __forceinline__ constexpr int feature_at(int row) {
    return Traits::kPlacedColumns ? placed_column(row) : row;
  }
  static_assert(Shape::kRows % kRowStep == 0 && Shape::kCols % kRowStep == 0);
  static_assert(kColChunks % kColSpan == 0 && Traits::kDepth % kDepthStep == 0);

 public:
  __device__ __forceinline__ explicit RowLoader(const RowGemmParams& params)
      : params_(params),
        row_target_(ptx::keep(depth_major_offset<Shape::kDepthBytes>(own_row(), own_chunk()))),
        weight_target_(outer_major_offset<Traits::kBBytes, Traits::kElementBytes>(own_depth(),
                                                                                  own_col_chunk())),
        packed_(params, number()) {}

  static __device__ __forceinline__ void prepare() {}

  /// The tile stays where it is until its last block is loaded.
  __device__ __forceinline__ int start(const RowTile& tile) {
    tile_ = &tile;
    const bool good_indices = locate_rows(tile);
    packed_.start(params_, tile, number());
    weights_ = first_weights(params_.weights + tile.expert * params_.expert_bytes,
                             params_.weight_bytes, tile);
    cols_left_ = params_.out.cols - own_feature(tile);
    const bool regular = Traits::kLoads == Loads::kVectors && good_indices &&
                         tile.feature + Shape::kCols <= params_.out.cols;
    granules_ = regular ? ceil_div(tile.rows, Shape::kGranule) : 0;
    return depth_blocks() + params_.low_blocks;
  }

  /// Copies the next block of depth, the one before the tile's last `left`, all at once: spread
  /// over the multiplications of a block, the copies came too late (Mixtral-8x7B fwd1 388 TFLOP/s,
  /// not 393, on an H200).
  __device__ __forceinline__ void begin_load(std::uint32_t stage, int left) {
    left -= params_.low_blocks;  // of the depth itself
    const bool whole = left > 0 || (left == 0 && params_.depth % Traits::kDepth == 0);
    const int granules = whole ? granules_ : 0;
    if constexpr (Traits::kLoads == Loads::kVectors) load_regular(stage, granules);
    if constexpr (Traits::kQuantised) load_packed(stage, left);
      // A loop, not a branch, whose instructions would be predicated into every block.
#pragma unroll 1
    for (int times = ptx::opaque(granules == 0); times > 0; --times) {
      if (left < 0 && left + params_.low_blocks >= 0) {
        load_low_rank(stage, -1 - left);
      } else {
        const int depth_left = params_.depth - (depth_blocks() - 1 - left) * Traits::kDepth;
        load_rows(stage, depth_left);
        if constexpr (!Traits::kQuantised) {
          load_weights(stage, depth_left, weights_, params_.weight_bytes);
        }
      }
    }
  }
  template <int Parts>
  static __device__ __forceinline__ void load_part(std::uint32_t, int, int) {}

  __device__ __forceinline__ void end_load(int) {
    base_ += Shape::kDepthBytes;
    weights_ += kDepthMajor ? Shape::kDepthBytes : Traits::kDepth * params_.weight_bytes;
  }

  /// Of a warp that only copies.
  __device__ __forceinline__ void load(std::uint32_t stage, int slot, int left) {
    begin_load(stage, left);
    end_load(slot);
  }

  /// There are no more tiles: further loads, with negative `left`, copy zeros.
  __device__ __forceinline__ void stop() { granules_ = 0; }

  static __device__ __forceinline__ const float* scales(int) { return nullptr; }

  /// What TileFeed and copy_tiles ask of packed weights.
  __device__ __forceinline__ DecodeTicket ticket() const requires Traits::kQuantised {
    return ticket_;
  }
  __device__ __forceinline__ void decode(std::uint32_t stage, DecodeTicket ticket) const {
    packed_.decode(params_, stage + Shape::kRowsBytes, ticket, number());
  }

 private:
  /// Opaque to warps that only copy: what follows from it is not kept from tile to tile.
  static __device__ __forceinline__ int number() {
    const int number = static_cast<int>(threadIdx.x) - Shape::kFirstCopyThread;
    return Shape::kLoadWarps > 0 ? ptx::opaque(number) : number;
  }
  static __device__ __forceinline__ int own_chunk() { return number() % kChunks; }
  static __device__ __forceinline__ int own_row() { return number() / kChunks; }
  static __device__ __forceinline__ int own_col_chunk() { return number() % kColSpan; }
  static __device__ __forceinline__ int own_depth() { return number() / kColSpan; }

  /// Where a stage takes this thread's chunk of pass i of the rows and of the weights.
  __device__ __forceinline__ std::uint32_t row_target(std::uint32_t stage, int i) const {
    return stage + depth_major_pass<Shape::kDepthBytes, kRowStep>(row_target_, i);
  }
  __device__ __forceinline__ std::uint32_t weight_target(std::uint32_t stage, int i) const {
    stage += Shape::kRowsBytes;
    if constexpr (kDepthMajor) {
      return row_target(stage, i);
    } else {
      return stage + i % kColPasses * kColSpan * kChunkBytes +
             outer_major_pass<Traits::kBBytes, Traits::kElementBytes, kDepthStep>(weight_target_,
                                                                                  i / kColPasses);
    }
  }

  __device__ __forceinline__ int depth_blocks() const {
    return ceil_div(params_.depth, Traits::kDepth);
  }

  /// Without conditions but the tile's height, 0 for nothing at all.
  __device__ __forceinline__ void load_regular(std::uint32_t stage, int granules) const {
    // Opaque to warps that only copy: multiples are not kept in registers from block to block. What
    // it takes to compute them also keeps the copies apart; with half as many instructions, copies
    // right after each other, Mixtral-8x7B dx1 was 3 % slower on an H200 (probably ldmatrix waits
    // after them for shared memory).
    constexpr bool kOpaque = Shape::kLoadWarps > 0;
    const std::int64_t weight_bytes =
        kOpaque ? ptx::opaque(params_.weight_bytes) : params_.weight_bytes;
    const auto unit_bytes =
        static_cast<unsigned>(kOpaque ? ptx::opaque(static_cast<int>(params_.row_pitch.unit_bytes))
                                      : static_cast<int>(params_.row_pitch.unit_bytes));
#pragma unroll
    for (int i = 0; i < kRowPasses; ++i) {
      ptx::cp_async_16_if(row_target(stage, i), base_ + std::uint64_t{rows_[i]} * unit_bytes,
                          i * kRowStep / Shape::kGranule < granules);
    }
#pragma unroll
    for (int i = 0; !Traits::kQuantised && i < kWeightPasses; ++i) {
      ptx::cp_async_16_if(weight_target(stage, i), weight(i, weights_, weight_bytes), granules > 0);
    }
  }

  /// The packed weights of a block, which has any: the one before the last `left` of the depth.
  __device__ __forceinline__ void load_packed(std::uint32_t stage, int left) {
    ticket_ = {};
    if (left < 0) return;
    ticket_ = packed_.copy(params_, stage + Shape::kRowsBytes, *tile_,
                           (depth_blocks() - 1 - left) * Traits::kDepth, number());
  }

  /// This thread's chunk of the row of pass i, at the block to load.
  __device__ __forceinline__ const std::byte* row(int i) const {
    return base_ + std::uint64_t{rows_[i]} * params_.row_pitch.unit_bytes;
  }

  /// This thread's chunk of the weights of pass i, the first of which is at `weights`.
  static __device__ __forceinline__ const std::byte* weight(int i, const std::byte* weights,
                                                            std::int64_t weight_bytes) {
    if constexpr (kDepthMajor) return weights + feature_at(i * kWeightStep) * weight_bytes;
    return weights + i / kColPasses * kWeightStep * weight_bytes +
           i % kColPasses * kColSpan * kChunkBytes;
  }

  /// The first feature that this thread loads.
  static __device__ __forceinline__ int own_feature(const RowTile& tile) {
    return tile.feature +
           (kDepthMajor ? feature_at(own_row()) : own_col_chunk() * Traits::kChunkElements);
  }
  /// This thread's first chunk of an expert's weights, at depth 0.
  static __device__ __forceinline__ const std::byte* first_weights(const std::byte* expert,
                                                                   std::int64_t weight_bytes,
                                                                   const RowTile& tile) {
    const int feature = own_feature(tile);
    if constexpr (kDepthMajor) return expert + feature * weight_bytes + own_chunk() * kChunkBytes;
    return expert + own_depth() * weight_bytes +
           static_cast<std::int64_t>(feature) * Traits::kElementBytes;
  }

  /// Block `block` of the low-rank part. Nothing of it waits in registers: all but the tile is
  /// found anew.
  __device__ __forceinline__ void load_low_rank(std::uint32_t stage, int block) const {
    const RowTile& tile = *tile_;
    const int depth_left = params_.low_rank - block * Traits::kDepth;
    const int inside = depth_left - own_chunk() * Traits::kChunkElements;
    const std::byte* rows =
        params_.low_rows + block * Shape::kDepthBytes + own_chunk() * kChunkBytes;
    const auto source = [&](int i) {
      return rows +
             (tile.row + min(own_row() + i * kRowStep, tile.rows - 1)) * params_.low_row_bytes;
    };
#pragma unroll 1
    for (int i = 0; i < kRowPasses; ++i) {
      copy_chunks<Traits, 1>([&](int) { return row_target(stage, i); },
                             [&](int) { return source(i); }, [&](int) { return inside; });
    }
    const std::int64_t pitch = params_.low_weight_bytes;
    const std::byte* weights =
        first_weights(params_.low_weights + tile.expert * params_.low_expert_bytes, pitch, tile) +
        block * (kDepthMajor ? Shape::kDepthBytes : Traits::kDepth * pitch);
    load_weights(stage, depth_left, weights, pitch);
  }

  /// Whether all of them exist.
  __device__ __forceinline__ bool locate_rows(const RowTile& tile) {
    base_ = params_.rows + own_chunk() * kChunkBytes;
    const int first = own_row();
    const auto position = [&](int i) {
      return tile.row + min(first + i * kRowStep, tile.rows - 1);
    };
    if (!params_.gather) {
#pragma unroll
      for (int i = 0; i < kRowPasses; ++i) {
        rows_[i] = static_cast<unsigned>(position(i)) * params_.row_pitch.units;
      }
      return true;
    }
    // All loads in flight before the first use; warps that only copy have time, but few registers.
    constexpr int kInFlight = Shape::kLoadWarps > 0 ? kRowPasses / 2 : kRowPasses;
    bool good = true;
#pragma unroll
    for (int start = 0; start < kRowPasses; start += kInFlight) {
      IndexArray::Fetched fetched[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        fetched[i] = params_.gather_indices.fetch(position(start + i));
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int flat = fetched[i].below(params_.flat_rows);
        rows_[start + i] = flat < 0 ? kNoRow
                                    : params_.divisor.divide(static_cast<unsigned>(flat)) *
                                          params_.row_pitch.units;
        good = good && flat >= 0;
      }
    }
    return good;
  }

  __device__ __forceinline__ void load_rows(std::uint32_t stage, int depth_left) const {
    const int inside = depth_left - own_chunk() * Traits::kChunkElements;
    copy_chunks<Traits, kRowPasses>([&](int i) { return row_target(stage, i); },
                                    [&](int i) { return rows_[i] != kNoRow ? row(i) : base_; },
                                    [&](int i) { return rows_[i] != kNoRow ? inside : 0; });
  }

  __device__ __forceinline__ void load_weights(std::uint32_t stage, int depth_left,
                                               const std::byte* weights,
                                               std::int64_t weight_bytes) const {
    // Vectors are copied one by one: this is rare, and short code without registers of its own.
    constexpr bool kVectors = Traits::kLoads == Loads::kVectors;
    const auto copy = [](const auto& target, const auto& source, const auto& valid) {
#pragma unroll 1
      for (int i = 0; kVectors && i < kWeightPasses; ++i) {
        copy_chunks<Traits, 1>([&](int) { return target(i); }, [&](int) { return source(i); },
                               [&](int) { return valid(i); });
      }
      if constexpr (!kVectors) copy_chunks<Traits, kWeightPasses>(target, source, valid);
    };
    const auto target = [&](int i) { return weight_target(stage, i); };
    const auto source = [&](int i) { return weight(i, weights, weight_bytes); };
    if constexpr (kDepthMajor) {
      const int inside = depth_left - own_chunk() * Traits::kChunkElements;
      copy(target, source,
           [&](int i) { return feature_at(i * kRowStep) < cols_left_ ? inside : 0; });
    } else {
      const int depths = depth_left - own_depth();
      copy(target, source, [&](int i) {
        const int cols = cols_left_ - i % kColPasses * kColSpan * Traits::kChunkElements;
        return i / kColPasses * kDepthStep < depths ? cols : 0;
      });
    }
  }

  const RowGemmParams& params_;
  const RowTile* tile_ = nullptr;
  const std::uint32_t row_target_;  ///< where a stage takes this thread's first chunk of the rows
  const std::uint32_t weight_target_;  ///< of the weights, if their features are contiguous
  const std::byte* base_;              ///< this thread's chunk of row 0, at the block to load
  unsigned rows_[kRowPasses];          ///< in units of the pitch
  const std::byte* weights_;
  std::conditional_t<Traits::kQuantised, QuantisedWeights<Traits>, PlainWeights> packed_;
  DecodeTicket ticket_;  ///< of the block copied last
  int granules_;         ///< the tile's height, 0 if no block of it is regular
  int cols_left_;        ///< features from the first that this thread loads on
};

/// The flat row that row `local` of the tile stands for, if somebody asks for it; -1 if there is
/// none.
__device__ __forceinline__ int flat_row_of(const RowGemmParams& params, const RowTile& tile,
                                           int local) {
  const bool indexed = params.scatter || params.multiply;
  return indexed && local < tile.rows
             ? flat_row(params.gather_indices, tile.row + local, params.flat_rows)
             : -1;
}

/// The row of the output that it goes to, negative for none.
__device__ __forceinline__ int target_row(const RowGemmParams& params, const RowTile& tile,
                                          int local, int flat) {
  return params.scatter ? flat : (local < tile.rows ? tile.row + local : -1);
}

/// The factor of its results.
template <typename Element>
__device__ __forceinline__ float target_scale(const RowGemmParams& params, int flat) {
  return flat < 0 ? 1.0f : params.router_weight<Element>(flat);
}

/// Both, as the warps that only copy hand them on.
struct RowTarget {
  int row;
  float scale;  ///< set if results are multiplied
};
static_assert(sizeof(RowTarget) == 8, "RowGemmLayout");

/// The loader of warps that only copy: finds the targets of a tile's rows, too, while the tile
/// before is multiplied. At a tile's end their two dependent loads would hold up every warp.
template <typename Traits>
class RowStreamLoader : public RowLoader<Traits> {
  using Shape = typename Traits::Shape;

 public:
  __device__ __forceinline__ RowStreamLoader(const RowGemmParams& params, RowTarget* targets)
      : RowLoader<Traits>(params), params_(params), targets_(targets) {}

  /// The ring's slot of the tile with this number.
  static __device__ __forceinline__ int slot_of(int number) {
    return number % kTargetSlots * Shape::kRows;
  }

  __device__ __forceinline__ int start(const RowTile& tile) {
#pragma unroll 1
    for (int local = static_cast<int>(threadIdx.x) - Shape::kFirstCopyThread; local < Shape::kRows;
         local += Shape::kCopyThreads) {
      const int flat = flat_row_of(params_, tile, local);
      RowTarget target = {};
      target.row = target_row(params_, tile, local, flat);
      if (params_.multiply) target.scale = target_scale<typename Traits::Element>(params_, flat);
      targets_[slot_of(number_) + local] = target;
    }
    ++number_;
    return RowLoader<Traits>::start(tile);
  }

 private:
  const RowGemmParams& params_;
  RowTarget* targets_;
  int number_ = 0;  ///< of the next tile
};

}  // namespace moegemm::cuda::sm80
