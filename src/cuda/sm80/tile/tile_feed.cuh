#pragma once

#include "cuda/device/segments.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/sm80/tile/gemm_traits.cuh"

namespace moegemm::cuda::sm80 {

/// Keeps the ring of stages full: while one block of depth is multiplied, the next ones, of this
/// tile or of those that follow, are on their way. All threads load; warp 0 also decodes tiles.
///
/// One barrier per block of depth orders everything:
///   * wait() returns when the oldest stage has landed, for all threads, and everybody has read the
///     one before it, which the next fill overwrites;
///   * a tile decoded in one fill is looked at in a later one.
///
/// Loader:    prepare() comes first, when the first tiles are decoded; start(tile) returns the
/// tile's
///            blocks of depth, at least 1, and stop() follows the last tile. A block is copied by
///            begin_load, load_part<parts>(address, part) for each part and end_load(stage);
///            scales(stage) are factors of its depths, or null.
/// Scheduler: decode() gives the next tile, end marks after the last one; called by warp 0.
template <typename Traits, typename Loader, typename Scheduler>
class TileFeed {
  using Shape = typename Traits::Shape;
  using Tile = typename Scheduler::Tile;

 public:
  /// How far tiles are decoded ahead of the one that is loaded. 2 would do: a tile is decoded
  /// before the barrier that comes before its use.
  static constexpr int kDecodeAhead = 3;

  __device__ __forceinline__ TileFeed(Loader& loader, Scheduler& scheduler, std::byte* stages,
                                      Tile* tiles)
      : loader_(loader), scheduler_(scheduler), stages_(stages), tiles_(tiles) {
#pragma unroll 1
    for (int i = 0; i < kDecodeAhead; ++i) decode(i);
    __syncthreads();
    loader_.prepare();
#pragma unroll 1
    for (int i = 0; i < Shape::kStages - 1; ++i) {
      __syncthreads();
      advance();
      begin_fill();
      fill_part<1>(0);
      end_fill();
    }
    stage_ = 0;
  }

  /// The oldest stage is full, and the one before it free.
  __device__ __forceinline__ void wait() {
    ptx::cp_async_wait_group<Shape::kStages - 2>();
    __syncthreads();
  }
  __device__ __forceinline__ void advance() {
    stage_ = stage_ + 1 == Shape::kStages ? 0 : stage_ + 1;
  }
  __device__ __forceinline__ const std::byte* stage_pointer() const {
    return stages_ + stage_ * Shape::kStageBytes;
  }
  __device__ __forceinline__ std::uint32_t stage_address() const {
    return ptx::shared_address(stages_) + stage_ * Shape::kStageBytes;
  }
  __device__ __forceinline__ const float* scales() const { return loader_.scales(stage_); }

  /// Starts the copies of one more block of depth, once for every wait(): begin, all parts, end.
  __device__ __forceinline__ void begin_fill() {
    if (blocks_left_ == 0) next_tile();
    --blocks_left_;
    loader_.begin_load(fill_address(), blocks_left_);
  }
  template <int Parts>
  __device__ __forceinline__ void fill_part(int part) {
    loader_.template load_part<Parts>(fill_address(), part, blocks_left_);
  }
  __device__ __forceinline__ void end_fill() {
    ptx::cp_async_commit_group();
    loader_.end_load(stage_before(stage_));
  }

 private:
  static __device__ __forceinline__ int stage_before(int stage) {
    return stage == 0 ? Shape::kStages - 1 : stage - 1;
  }
  __device__ __forceinline__ std::uint32_t fill_address() const {
    return ptx::shared_address(stages_) + stage_before(stage_) * Shape::kStageBytes;
  }

  __device__ __forceinline__ void next_tile() {
    const Tile& next = tiles_[(loaded_ + 1) % kTileSlots];
    if (next.is_end()) {
      loader_.stop();
      return;
    }
    ++loaded_;
    blocks_left_ = loader_.start(next);
    decode(loaded_ + kDecodeAhead);
  }

  __device__ __forceinline__ void decode(int number) {
    if (threadIdx.x >= kWarpSize) return;
    const Tile tile = scheduler_.decode();
    if (threadIdx.x == 0) tiles_[number % kTileSlots] = tile;
  }

  Loader& loader_;
  Scheduler& scheduler_;
  std::byte* stages_;
  Tile* tiles_;
  int stage_ = 0;
  int loaded_ = -1;      ///< number of the tile that is being loaded
  int blocks_left_ = 0;  ///< of that tile; negative after the last one
};

}  // namespace moegemm::cuda::sm80
