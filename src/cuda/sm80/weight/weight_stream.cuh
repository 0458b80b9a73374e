#pragma once

#include "cuda/sm80/tile/load_warps.cuh"
#include "cuda/sm80/weight/weight_gemm_load.cuh"

/// What warps that only copy load for dW.
namespace moegemm::cuda::sm80 {

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

    static __device__ __forceinline__ int chunk() { return lane() % kChunks; }
    static __device__ __forceinline__ int row() { return lane() / kChunks; }
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
    const int n = tile.n + Dy::chunk() * Traits::kChunkElements;
    const int k = tile.k + X::chunk() * Traits::kChunkElements;
    dy_ = params_.dy + static_cast<std::int64_t>(n) * Traits::kElementBytes;
    x_ = params_.x + static_cast<std::int64_t>(k) * Traits::kElementBytes;
    n_exists_ = n < params_.n;
    k_exists_ = k < params_.out.cols;
    block_ = 0;
    position_ = tile.row + lane() / kOwnRows * Traits::kDepth + own_depth();
    end_ = tile.row + tile.rows;
    fetch();
    return depth_blocks<Traits>(tile);
  }

  __device__ __forceinline__ void load(std::uint32_t stage, int slot, int) {
    const int part = block_ % kBlocks;
    if (part == 0) look_up();
    ++block_;
    if (params_.multiply) {
      if (lane() / kOwnRows == part) scales_[slot * Traits::kDepth + own_depth()] = scale_;
      share_stores<Shape>();
    }
    const int first = part * kOwnRows;
    copy<Dy>(stage, dy_target_, dy_, params_.dy_pitch, dy_row_, first, n_exists_);
    copy<X>(stage + Shape::kRowsBytes, x_target_, x_, params_.x_pitch, x_row_, first, k_exists_);
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarpSize; }
  static __device__ __forceinline__ int warp() {
    return (threadIdx.x - Shape::kFirstCopyThread) / kWarpSize;
  }
  /// Of the row that this lane looks up, in its block.
  static __device__ __forceinline__ int own_depth() {
    return warp() + lane() % kOwnRows * Shape::kLoadWarps;
  }

  /// The index of the row at position_, on its way.
  __device__ __forceinline__ void fetch() {
    fetched_ = {};
    if (params_.indexed && position_ < end_) {
      fetched_ = params_.gather_indices.fetch(position_);
    }
  }

  /// The rows that the fetched indices name. Rows past the segment and absent ones are missing in
  /// both operands: 0 times a NaN opposite would not be 0.
  __device__ __forceinline__ void look_up() {
    const int flat = fetched_.below(params_.flat_rows);
    const unsigned source = flat < 0 ? kNoRow : params_.divisor.divide(static_cast<unsigned>(flat));
    const bool present = params_.indexed ? flat >= 0 : position_ < end_;
    const unsigned row = present ? static_cast<unsigned>(position_) : kNoRow;
    const auto in_units = [](unsigned number, const RowPitch& pitch) {
      return number == kNoRow ? kNoRow : number * pitch.units;
    };
    dy_row_ = in_units(params_.gather_dy ? source : row, params_.dy_pitch);
    x_row_ = in_units(params_.gather_x ? source : row, params_.x_pitch);
    if (params_.multiply) {
      scale_ = flat < 0 ? 0.0f
                        : router_weight<typename Traits::Element>(params_.topk_weights,
                                                                  params_.weights_are_fp32, flat);
    }
    position_ += kBlocks * Traits::kDepth;
    fetch();
  }

  /// The rows of lanes `first` and following, kOwnRows of them.
  template <typename Share>
  static __device__ __forceinline__ void copy(std::uint32_t stage, std::uint32_t target,
                                              const std::byte* base, const RowPitch& pitch,
                                              unsigned rows, int first, bool exists) {
    // First to the lanes that copy the same rows, pass after pass.
    const int own = first + lane() % Share::kPasses * Share::kRows + Share::row();
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
