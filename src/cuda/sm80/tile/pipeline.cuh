#pragma once

#include "cuda/device/pipeline.cuh"
#include "cuda/device/schedule/tile_scheduler.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm80/tile/traits.h"

/// How tiles and the operands of their blocks of depth reach the warps that multiply: through a
/// ring of stages that all warps fill (TileFeed), or some that do nothing else (copy_tiles,
/// StageReader).
namespace moegemm::cuda::sm80 {

/// What the schedulers of all kernels share: the queue of tiles, and whose it is.
template <typename Shape_>
class TileSource {
 public:
  using Shape = Shape_;
  __device__ __forceinline__ TileSource(TileCounter* counter, int tiles) : queue_(counter, tiles) {}

  /// At the end, by all threads that copy.
  __device__ __forceinline__ void leave() {
    if (threadIdx.x == Shape::kFirstCopyThread) queue_.leave();
  }

  /// The first warp that copies decodes tiles.
  static __device__ __forceinline__ bool schedules() {
    return threadIdx.x / kWarpSize == Shape::kFirstCopyThread / kWarpSize;
  }

 protected:
  TileQueue queue_;
};

/// A loader whose copies arrive packed: ticket() says what is to be known of the block that it
/// copied last, decode(stage, ticket) decodes what this thread copied of a block.
template <typename Loader>
concept Decodes = requires(Loader& loader) {
  loader.ticket();
};
struct NoTicket {};
template <typename Loader>
__device__ __forceinline__ auto ticket_of(Loader& loader) {
  if constexpr (Decodes<Loader>) {
    return loader.ticket();
  } else {
    return NoTicket{};
  }
}

/// Keeps the ring of stages full: while one block of depth is multiplied, the next ones, of this
/// tile or of those that follow, are on their way. All threads load; warp 0 also decodes tiles.
///
/// One barrier per block of depth orders everything:
///   * wait() returns when the oldest stage has landed, for all threads, and everybody has read the
///     one before it, which the next fill overwrites;
///   * a tile decoded in one fill is looked at in a later one.
///
/// Loader:    prepare() comes first, when the first tiles are decoded; start(tile) returns the
///            tile's blocks of depth, at least 1, and stop() follows the last tile. A block is
///            copied by begin_load, load_part<parts>(address, part) for each part and
///            end_load(stage); scales(stage) are factors of its depths, or null.
/// Scheduler: decode() gives the next tile, end marks after the last one; called by warp 0.
template <typename Loader, typename Scheduler>
class TileFeed {
  using Shape = typename Scheduler::Shape;
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

  /// A tile is in its slot before it is loaded.
  static __device__ __forceinline__ void wait_for_tile() {}

  /// The oldest stage is full, and the one before it free.
  __device__ __forceinline__ void wait() {
    ptx::cp_async_wait_group<Shape::kStages - 2>();
    if constexpr (Decodes<Loader>) loader_.decode(stage_address(), tickets_[0]);
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
    if constexpr (Decodes<Loader>) {
#pragma unroll
      for (int i = 0; i + 1 < kTickets; ++i) tickets_[i] = tickets_[i + 1];
      tickets_[kTickets - 1] = loader_.ticket();
    }
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

  static constexpr int kTickets = Shape::kStages - 1;
  decltype(ticket_of(std::declval<Loader&>())) tickets_[kTickets];  ///< of the full stages in order
  Loader& loader_;
  Scheduler& scheduler_;
  std::byte* stages_;
  Tile* tiles_;
  int stage_ = 0;
  int loaded_ = -1;      ///< number of the tile that is being loaded
  int blocks_left_ = 0;  ///< of that tile; negative after the last one
};

/// A third of the warps copy: the registers of three threads, one of each warpgroup, are at most
/// 504, three times what the block starts with.
constexpr int kLoadRegisters = 88;
constexpr int kMultiplyRegisters = 208;
static_assert(kLoadRegisters + 2 * kMultiplyRegisters <= 504);
constexpr int kLoadBarrier = 1;   ///< 0 is __syncthreads'
constexpr int kFreeBarriers = 2;  ///< the first of one for each stage
constexpr int kNamedRowsBarrier = 15;

template <typename Shape>
struct StageRing {
  using State = PipelineState<Shape::kStages>;
  std::uint64_t full[Shape::kStages];

  /// By one thread; a block barrier must follow.
  __device__ __forceinline__ void prepare() {
    // Copies of every thread, and the first thread for what it stored in the ordinary way.
    for (auto& barrier : full) ptx::mbarrier_init(&barrier, Shape::kCopyThreads + 1);
    ptx::fence_mbarrier_init();
  }
  __device__ __forceinline__ void wait_full(const State& state) {
    ptx::mbarrier_wait(&full[state.slot], state.phase);
  }
  __device__ __forceinline__ bool is_full(const State& state) {
    return ptx::mbarrier_poll(&full[state.slot], state.phase);
  }
  /// By a multiplying warp that has read the stage. A hardware barrier, at which whole warps
  /// arrive: with one thread of each at an mbarrier after __syncwarp, as fast, racecheck reported
  /// hazards.
  static __device__ __forceinline__ void free(const State& state) {
    ptx::bar_arrive(kFreeBarriers + state.slot, Shape::kThreads);
  }
  /// By the copying warps, from the second lap on.
  static __device__ __forceinline__ void wait_free(const State& state) {
    ptx::bar_sync(kFreeBarriers + state.slot, Shape::kThreads);
  }
};

/// By all threads, for kernels that have one.
template <typename Shape>
__device__ __forceinline__ void prepare_ring(StageRing<Shape>& ring) {
  if (Shape::kLoadWarps > 0 && threadIdx.x == Shape::kFirstCopyThread) ring.prepare();
}

/// Among the copying warps: what all of them have stored, the first thread signals.
template <typename Shape>
__device__ __forceinline__ void share_stores() {
  ptx::bar_sync(kLoadBarrier, Shape::kCopyThreads);
}

/// The copying warps: every tile of the scheduler, block of depth after block of depth. A decoded
/// tile becomes visible with its first block; the end mark has a block of its own, without copies.
/// Weights that come packed are decoded when the copies of the next block have been started.
template <typename Shape, typename Loader, typename Scheduler>
__device__ __forceinline__ void copy_tiles(Loader& loader, Scheduler& scheduler, std::byte* stages,
                                           typename Scheduler::Tile* tiles,
                                           StageRing<Shape>& ring) {
  const bool leads = threadIdx.x == Shape::kFirstCopyThread;
  const std::uint32_t address = ptx::shared_address(stages);
  typename StageRing<Shape>::State state;
  int before = -1;  // the stage that is to be decoded
  [[maybe_unused]] decltype(ticket_of(loader)) ticket;
  [[maybe_unused]] const auto publish = [&](int slot) {
    ptx::mbarrier_arrive(&ring.full[slot]);
    if (leads) ptx::mbarrier_arrive(&ring.full[slot]);
  };
  int unused = Shape::kStages;  // stages of the first lap
  for (int number = 0;; ++number) {
    typename Scheduler::Tile& tile = tiles[number % kTileSlots];
    if (scheduler.schedules()) {
      const typename Scheduler::Tile decoded = scheduler.decode();
      if (leads) tile = decoded;
    }
    share_stores<Shape>();
    const bool is_end = tile.is_end();
    const int blocks = is_end ? 1 : loader.start(tile);
    share_stores<Shape>();
#pragma unroll 1
    for (int left = blocks - 1; left >= 0; --left) {
      if (unused > 0) {
        --unused;
      } else {
        ring.wait_free(state);
      }
      if (!is_end) loader.load(address + state.slot * Shape::kStageBytes, state.slot, left);
      if constexpr (Decodes<Loader>) {
        ptx::cp_async_commit_group();
        ptx::cp_async_wait_group<1>();
        if (before >= 0) {
          loader.decode(address + before * Shape::kStageBytes, ticket);
          publish(before);
        }
        before = state.slot;
        ticket = is_end ? decltype(ticket){} : loader.ticket();
      } else {
        ptx::cp_async_mbarrier_arrive_noinc(&ring.full[state.slot]);
        if (leads) ptx::mbarrier_arrive(&ring.full[state.slot]);
      }
      state.advance();
    }
    if (is_end) {
      if constexpr (Decodes<Loader>) publish(before);
      return;
    }
  }
}

/// What a multiplying warp sees of the ring: the feed of multiply_stream.
template <typename Shape>
class StageReader {
 public:
  /// `scales`, if any: `depth` factors for each stage.
  __device__ __forceinline__ StageReader(const std::byte* stages, StageRing<Shape>& ring,
                                         const float* scales = nullptr, int depth = 0)
      : stages_(stages), ring_(ring), scales_(scales), depth_(depth) {}

  /// It becomes visible with its first block.
  __device__ __forceinline__ void wait_for_tile() { wait(); }
  __device__ __forceinline__ void wait() { ring_.wait_full(state_); }
  /// The same for the stage after this one.
  __device__ __forceinline__ bool next_is_full() { return ring_.is_full(next()); }
  __device__ __forceinline__ void wait_for_next() { ring_.wait_full(next()); }
  /// This warp has read the stage.
  __device__ __forceinline__ void advance() {
    ring_.free(state_);
    state_.advance();
  }
  __device__ __forceinline__ const std::byte* stage_pointer() const {
    return stages_ + state_.slot * Shape::kStageBytes;
  }
  __device__ __forceinline__ std::uint32_t stage_address() const {
    return ptx::shared_address(stage_pointer());
  }
  __device__ __forceinline__ const float* scales() const { return scales_ + state_.slot * depth_; }

 private:
  __device__ __forceinline__ typename StageRing<Shape>::State next() const {
    auto state = state_;
    state.advance();
    return state;
  }

  const std::byte* stages_;
  StageRing<Shape>& ring_;
  const float* scales_;
  const int depth_;
  typename StageRing<Shape>::State state_;
};

/// All tiles of a block, by all its warps; `scales`, if any, are [stages][depth].
///
/// Gemm: loader() and scheduler(), those of this kernel; start(), called by the warps that multiply
///       before the first tile; compute(tile, number, feed).
template <typename Traits, typename Gemm>
__device__ __forceinline__ void run_tiles(const Gemm& gemm, std::byte* stages,
                                          typename Gemm::Tile* tiles,
                                          StageRing<typename Traits::Shape>& ring,
                                          const float* scales = nullptr) {
  using Shape = typename Traits::Shape;
  static_assert(sizeof(typename Gemm::Tile) <= kTileBytes);
  const auto compute_all = [&](auto& feed) {
    for (int number = 0;; ++number) {
      feed.wait_for_tile();
      const auto& tile = tiles[number % kTileSlots];  // not copied: registers are short here
      if (tile.is_end()) return;
      gemm.compute(tile, number, feed);
    }
  };
  if constexpr (Shape::kLoadWarps > 0) {
    if (threadIdx.x >= Shape::kFirstCopyThread) {
      ptx::setmaxnreg_dec<kLoadRegisters>();
      auto loader = gemm.loader();
      auto scheduler = gemm.scheduler();
      copy_tiles(loader, scheduler, stages, tiles, ring);
      scheduler.leave();
      return;
    }
    ptx::setmaxnreg_inc<kMultiplyRegisters>();
    gemm.start();
    StageReader<Shape> feed(stages, ring, scales, Traits::kDepth);
    compute_all(feed);
  } else {
    gemm.start();
    auto loader = gemm.loader();
    auto scheduler = gemm.scheduler();
    TileFeed feed(loader, scheduler, stages, tiles);
    compute_all(feed);
    scheduler.leave();
  }
}

}  // namespace moegemm::cuda::sm80
