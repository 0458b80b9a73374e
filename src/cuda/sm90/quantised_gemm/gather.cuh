#pragma once

#include "cuda/ptx/opaque.cuh"
#include "cuda/sm90/quantised_gemm/scales.cuh"
#include "cuda/sm90/row_gemm/load.cuh"

/// Gathered rows beside quantised weights, in tiles of many rows. The four producer warps copy rows
/// and take turns with the tables of scales. Indices and scales take long to arrive, and a ring of
/// four stages does not hide that where a tile begins. So the next tile is published while this one
/// is loaded, and what its first stages need is requested then.
namespace moegemm::cuda::sm90 {

/// Indices of a tile's rows on their way. Eight threads copy the same rows: each has fetched some
/// of their indices.
template <typename Traits>
struct IndicesAhead {
  static constexpr int kSharing = 8;
  static constexpr int kCount = GatheredRows<Traits>::kCount / kSharing;
  static_assert(GatheredRows<Traits>::kCount % kSharing == 0);

  IndexArray::Fetched fetched[kCount];

  __device__ __forceinline__ void fetch(const RowGemmParams& params, const Tile& tile) {
    const int thread = ptx::thread_index();  // read anew: registers are short
    const int first = thread / kSharing + thread % kSharing * GatheredRows<Traits>::kStep;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // Rows past the tile repeat its last one, and are never stored.
      const int row = min(first + i * kSharing * GatheredRows<Traits>::kStep, tile.rows - 1);
      fetched[i] = params.gather_indices.fetch(tile.row + row);
    }
  }

  /// Where the rows are, by whole warps.
  __device__ __forceinline__ void locate(const RowGemmParams& params,
                                         GatheredRows<Traits>& rows) const {
    const int lane = threadIdx.x % kWarpSize;
    const std::byte* chunk = params.rows + lane % kSharing * 16;
    rows.missing = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int flat = fetched[i].below(params.flat_rows);
      const unsigned missing = __ballot_sync(kFullMask, flat < 0);
      rows.missing |= (missing >> lane / kSharing * kSharing & 0xff) << i * kSharing;
      const unsigned source = params.divisor.divide(static_cast<unsigned>(max(flat, 0)));
#pragma unroll
      for (int j = 0; j < kSharing; ++j) {
        rows.pointers[i * kSharing + j] =
            chunk + __shfl_sync(kFullMask, source, j, kSharing) * params.row_bytes;
      }
    }
  }
};

/// A producer warp's tiles: this one and the next. The first warp decides which that is.
template <typename Traits>
class TilesAhead {
 public:
  __device__ __forceinline__ TilesAhead(const RowGemmParams& params,
                                        const RowGemmShared<Traits>& shared)
      : params_(params),
        shared_(shared),
        queue_(params.counter, schedules() ? shared.starts()[params.experts].tile : 0),
        decoder_(shared.starts(), params.experts) {
    if (schedules()) publish(place(0));
    wait_for(place(0));
  }

  static __device__ __forceinline__ bool schedules() { return threadIdx.x < kWarpSize; }

  /// Not copied: registers are short.
  __device__ __forceinline__ const Tile& current() const { return shared_.tiles()[slot()]; }
  __device__ __forceinline__ int slot() const { return place(0).slot; }
  /// When it was waited for. Without rows: there is none.
  __device__ __forceinline__ const Tile& next() const { return shared_.tiles()[place(1).slot]; }

  __device__ __forceinline__ void publish_next() {
    if (!schedules()) return;
    queue_.advance();
    publish(place(1));
  }
  __device__ __forceinline__ void wait_for_next() { wait_for(place(1)); }
  __device__ __forceinline__ void advance() {
    if (!schedules()) ptx::mbarrier_arrive(&shared_.rings().tile.empty[slot()]);
    ++position_;
  }
  /// When the current tile has no rows: there is no other.
  __device__ __forceinline__ void leave() {
    if (threadIdx.x == 0) queue_.leave();
  }

 private:
  /// Opaque: what follows from the position must not wait in registers.
  __device__ __forceinline__ PipelineState<kTileSlots> place(int ahead) const {
    return PipelineState<kTileSlots>::at(ptx::opaque(position_) + ahead);
  }
  __device__ __forceinline__ void publish(const PipelineState<kTileSlots>& slot) {
    Tile tile{};
    if (!queue_.done()) {
      tile = find_tile(params_, shared_, decoder_, queue_.current());
      prefetch_scales<Traits>(params_, tile);
    }
    publish_tile(shared_, tile, slot);
  }
  __device__ __forceinline__ void wait_for(const PipelineState<kTileSlots>& slot) {
    if (!schedules()) shared_.rings().tile.wait_full(slot);
  }

  const RowGemmParams& params_;
  const RowGemmShared<Traits>& shared_;
  TileQueue queue_;
  TileDecoder decoder_;
  int position_ = 0;  ///< of the current tile; one register, where slot and phase are two
};

/// One stage, and by the warp `writer` its table of scales. Then that warp requests those of the
/// next stage that is its own, which may be in the next tile.
template <typename Traits, bool Checked, int Offset = 0>
__device__ __forceinline__ void load_stage_and_scales(const RowGemmParams& params,
                                                      const RowGemmShared<Traits>& shared,
                                                      const TilesAhead<Traits>& tiles, int depth,
                                                      const GatheredRows<Traits>& rows,
                                                      ScaleWriter<Traits, 1>& scales, int writer,
                                                      int& stages) {
  auto stage = PipelineState<Traits::kStages>::at(stages++);
  const int slot = stage.slot;
  load_gathered_stage<Traits, Checked, Offset>(params, shared, tiles.current(), depth, rows, stage);
  if (ptx::thread_index() / kWarpSize != writer) return;
  scales.write(params, shared.scale_table(slot), 0, &shared.rings().stage.full[slot]);
  const int block = depth / kDepth + kWarpgroupWarps;
  const bool inside = block * kDepth < params.depth;
  scales.fetch(params, inside ? tiles.current() : tiles.next(), inside ? block : writer, 0);
}

/// Every stage of a tile; meanwhile the next tile becomes known. Full stages go in groups, one for
/// each warp's turn: see load_gathered_tile.
template <typename Traits>
__device__ __forceinline__ void load_tile_and_scales(const RowGemmParams& params,
                                                     const RowGemmShared<Traits>& shared,
                                                     TilesAhead<Traits>& tiles,
                                                     IndicesAhead<Traits>& indices,
                                                     GatheredRows<Traits>& rows,
                                                     ScaleWriter<Traits, 1>& scales, int& stages) {
  constexpr int kGroup = kWarpgroupWarps;
  // A group requests scales of up to so many blocks after its first.
  constexpr int kReach = 2 * kGroup - 1;
  const bool whole = !__any_sync(kFullMask, rows.missing != 0);
  enum { kUnknown, kPublished, kRequested } next = kUnknown;
#pragma unroll 1
  for (int depth = 0; depth < params.depth;) {
    // Late, since who has taken a tile keeps it from blocks that are faster.
    if (next == kUnknown && depth + (kReach + kGroup) * kDepth >= params.depth) {
      tiles.publish_next();
      next = kPublished;
    }
    if (next == kPublished && depth + kReach * kDepth >= params.depth) {
      tiles.wait_for_next();
      if (tiles.next().rows > 0) indices.fetch(params, tiles.next());
      next = kRequested;
    }
    if (whole && depth + kGroup * kDepth <= params.depth) {
      load_stage_and_scales<Traits, false>(params, shared, tiles, depth, rows, scales, 0, stages);
      load_stage_and_scales<Traits, false, kRowBytes>(params, shared, tiles, depth + kDepth, rows,
                                                      scales, 1, stages);
      load_stage_and_scales<Traits, false, 2 * kRowBytes>(
          params, shared, tiles, depth + 2 * kDepth, rows, scales, 2, stages);
      load_stage_and_scales<Traits, false, 3 * kRowBytes>(
          params, shared, tiles, depth + 3 * kDepth, rows, scales, 3, stages);
      rows.advance(kGroup);
      depth += kGroup * kDepth;
    } else {
      load_stage_and_scales<Traits, true>(params, shared, tiles, depth, rows, scales,
                                          depth / kDepth % kGroup, stages);
      rows.advance(1);
      depth += kDepth;
    }
  }
  const int warp = threadIdx.x / kWarpSize;
  if (warp * kDepth >= params.depth) {  // it had no turn
    scales.fetch(params, tiles.next(), warp, 0);
  }
  if (params.low_rank > 0) {
    auto stage = PipelineState<Traits::kStages>::at(stages);
    load_gathered_low_rank(params, shared, tiles.current(), stage);
    stages += low_depth<Traits>(params) / Traits::kLowDepth;
  }
}

/// What load_gathered is for plain weights.
template <typename Traits, typename WriteInfo>
__device__ __forceinline__ void load_gathered_ahead(const RowGemmParams& params,
                                                    const RowGemmShared<Traits>& shared,
                                                    const WriteInfo& write_info) {
  if (TilesAhead<Traits>::schedules()) ptx::griddepcontrol_launch_dependents();
  TilesAhead<Traits> tiles(params, shared);
  IndicesAhead<Traits> indices;
  GatheredRows<Traits> rows;
  ScaleWriter<Traits, 1> scales;
  int stages = 0;  // that are loaded; one register, as TilesAhead's position
  if (tiles.current().rows > 0) {
    indices.fetch(params, tiles.current());
    scales.fetch(params, tiles.current(), threadIdx.x / kWarpSize, 0);
  }
#pragma unroll 1
  while (tiles.current().rows > 0) {
    write_info(tiles.current(), tiles.slot());
    indices.locate(params, rows);
    load_tile_and_scales<Traits>(params, shared, tiles, indices, rows, scales, stages);
    tiles.advance();
  }
  tiles.leave();
}

}  // namespace moegemm::cuda::sm90
