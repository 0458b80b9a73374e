#pragma once

#include "cuda/device/segments.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/sm80/stream_gemm/decode.cuh"

/// Weights through each warp's own ring, and the rows that they are multiplied with.
namespace moegemm::cuda::sm80 {

/// The expert of a tile, from `expert` on, where the last search ended: 32 are looked at at once.
/// Called by a whole warp.
__device__ __forceinline__ int expert_of_tile(const SegmentStart* starts, int experts, int tile,
                                              int expert) {
  while (true) {
    const int own = expert + lane_id();
    const bool beyond = own >= experts || starts[own + 1].tile > tile;
    const unsigned mask = __ballot_sync(kFullMask, beyond);
    if (mask != 0) return expert + __ffs(mask) - 1;
    expert += kWarpSize;
  }
}

/// The first feature of a tile, by its number among those of its expert.
__device__ __forceinline__ int column_of_tile(const StreamGemmParams& params, int local) {
  const auto tile = static_cast<unsigned>(local);
  const unsigned part = params.column_divisor.divide(tile);
  return static_cast<int>(tile - part * static_cast<unsigned>(params.column_tiles)) *
         kStreamFeatures;
}

/// A warp's weights: stages of 16 rows x 128 bytes, tile after tile, and their scales. Lane 4 r + c
/// copies chunks c and c + 4 of rows r and r + 8; chunk c of row r lies at place c ^ (r % 8), so
/// that eight lanes that read one chunk of eight rows find it in different banks.
template <typename Traits>
class WeightStream {
  using Scales = LoadedScales<Traits::kFormat>;
  static constexpr int kRingBytes = Traits::kStages * kStreamStageBytes;

 public:
  /// Requests the first stages. `first` gets the scales of the very first one, unless they come for
  /// several stages.
  __device__ __forceinline__ WeightStream(const StreamGemmParams& params,
                                          const SegmentStart* starts, std::byte* ring, int tile,
                                          int tile_end, Scales& first)
      : params_(params),
        starts_(starts),
        ring_(ptx::shared_address(ring)),
        tile_(tile),
        tile_end_(tile_end) {
    if (tile_ < tile_end_) locate();
    first = next_ = {};
    request(0, ScaleStream<Traits::kFormat>::kBlocks ? next_ : first);
    request(kStreamStageBytes, next_);
  }

  /// Waits for the next stage, which is number `stage` of its tile, and requests one more. All
  /// lanes are done with the stage before when this returns; `decoder` gets scales.
  template <typename Decoder>
  __device__ __forceinline__ std::uint32_t next(Decoder& decoder, int stage) {
    ptx::cp_async_wait_group<Traits::kStages - 2>();
    __syncwarp();
    decoder.begin(params_, stage, next_);
    const int slot = slot_;
    slot_ = slot + kStreamStageBytes == kRingBytes ? 0 : slot + kStreamStageBytes;
    request(slot == 0 ? kRingBytes - kStreamStageBytes : slot - kStreamStageBytes, next_);
    return ring_ + slot;
  }

 private:
  __device__ __forceinline__ void locate() {
    expert_ = expert_of_tile(starts_, params_.experts, tile_, expert_);
    const int column = column_of_tile(params_, tile_ - starts_[expert_].tile);
    const int feature = column + lane_id() / 4;
    const int last = params_.out.cols - 1;  // results of rows past it are not stored
    const std::byte* weights =
        params_.weights + expert_ * params_.expert_bytes + lane_id() % 4 * 16;
    rows_[0] = weights + min(feature, last) * params_.weight_bytes;
    rows_[1] = weights + min(feature + 8, last) * params_.weight_bytes;
    scales_.locate(params_, expert_, feature, last);
    left_ = static_cast<int>(params_.weight_bytes);
  }

  /// A group in any case, so that groups are stages.
  __device__ __forceinline__ void request(int slot, Scales& scales) {
    if (tile_ < tile_end_) {
      const int r = lane_id() / 4;
      const std::uint32_t target = ring_ + slot + r * kStreamRowBytes + ((lane_id() % 4 ^ r) << 4);
      const int done = static_cast<int>(params_.weight_bytes) - left_;
      const int depth = Traits::kNibbles ? 2 * done : done;
      if (left_ >= kStreamRowBytes) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          ptx::cp_async_16_streaming(target + h * 1024, rows_[h]);
          ptx::cp_async_16_streaming((target ^ 64) + h * 1024, rows_[h] + 64);
        }
      } else {
        const int own = left_ - lane_id() % 4 * 16;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          ptx::cp_async_16_if(target + h * 1024, rows_[h], own > 0);
          ptx::cp_async_16_if((target ^ 64) + h * 1024, rows_[h] + 64, own > 64);
        }
      }
      load_scales(depth, scales);
      rows_[0] += kStreamRowBytes;
      rows_[1] += kStreamRowBytes;
      left_ -= kStreamRowBytes;
      if (left_ <= 0) {
        tile_ += Traits::kWarps;
        if (tile_ < tile_end_) locate();
      }
    }
    ptx::cp_async_commit_group();
  }

  /// Those that come with the stage at `depth`. A block of stages that follows one of a single
  /// stage, the last of a tile, has to wait until that one has begun: its scales come a stage
  /// later.
  __device__ __forceinline__ void load_scales(int depth, Scales& scales) const {
    constexpr int kBlockDepth = kBlockStages * Traits::kStageDepth;
    if constexpr (!ScaleStream<Traits::kFormat>::kBlocks) {
      scales_.load(params_, depth, scales);
    } else {
      const int first = depth < kBlockDepth ? params_.first_scales : 0;
      if (depth % kBlockDepth == first) scales_.load(params_, depth - first, scales);
    }
  }

  const StreamGemmParams& params_;
  const SegmentStart* starts_;
  const std::uint32_t ring_;
  int tile_;  ///< whose stages are requested
  const int tile_end_;
  int expert_ = 0;
  int left_ = 0;              ///< bytes of its rows that are not requested yet
  const std::byte* rows_[2];  ///< the next of them, of the lane's two rows
  ScaleStream<Traits::kFormat> scales_;
  int slot_ = 0;  ///< of the next stage, bytes
  Scales next_;   ///< of the stage after it, or of several
};

/// Decides what the block does next, by one whole warp: tiles from `tile` on, as many as it has
/// room for their rows.
__device__ __forceinline__ void plan_batch(const StreamGemmParams& params,
                                           const SegmentStart* starts, int tile, int tile_end,
                                           StreamPhase* phases, StreamBatch* batch) {
  int count = 0, slot = 0, expert = 0;
  while (tile < tile_end) {
    expert = expert_of_tile(starts, params.experts, tile, expert);
    const SegmentStart start = starts[expert];
    const int rows = starts[expert + 1].row - start.row;
    const int part = (tile - start.tile) / params.column_tiles;
    const RowRange range = row_range(rows, part, row_tiles(rows, params.tile_rows), params.granule);
    if (slot + range.count > params.row_slots) break;
    tile = min(start.tile + (part + 1) * params.column_tiles, tile_end);
    const int segment = params.placement.given() ? params.placement.begin(expert) : start.row;
    if (lane_id() == 0) {
      phases[count] = {tile, expert, segment + range.first, range.count, slot};
    }
    slot += range.count;
    ++count;
  }
  if (lane_id() == 0) *batch = {count, slot, tile};
}

/// One row in the order of the decoder: 16 bytes are what lane t multiplies in a step, four
/// neighbours of each of its two groups. By a whole warp; `source` is null for a row of zeros.
template <QuadOrder Order>
__device__ __forceinline__ void arrange_row(const std::byte* source, int depth, std::byte* target) {
  const int units = ceil_div(depth, kStepDepth) * 4;
#pragma unroll 2
  for (int unit = lane_id(); unit < units; unit += kWarpSize) {
    const int k = unit / 4 * kStepDepth + unit % 4 * 4;
    uint2 group[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool exists = source != nullptr && k + 16 * i < depth;
      group[i] =
          exists ? __ldg(reinterpret_cast<const uint2*>(source + (k + 16 * i) * 2)) : uint2{0, 0};
    }
    std::uint32_t first[2], second[2];
    arrange_quad<Order>(group[0].x, group[0].y, first);
    arrange_quad<Order>(group[1].x, group[1].y, second);
    *reinterpret_cast<uint4*>(target + unit * 16) = {first[0], first[1], second[0], second[1]};
  }
}

/// The rows of a batch, and where their results go.
template <typename Traits>
__device__ __forceinline__ void load_rows(const StreamGemmParams& params, const StreamBatch& batch,
                                          const StreamPhase* phases, StreamTarget* targets,
                                          std::byte* rows) {
#pragma unroll 1
  for (int slot = warp_id(); slot < batch.rows; slot += Traits::kWarps) {
    const bool after = lane_id() < batch.phases && phases[lane_id()].slot <= slot;
    const StreamPhase phase = phases[__popc(__ballot_sync(kFullMask, after)) - 1];
    const int position = phase.row + slot - phase.slot;
    const bool indexed = params.gather || params.scatter || params.multiply;
    const int flat = indexed ? flat_row(params.gather_indices, position, params.flat_rows) : -1;
    const int row = params.gather ? params.source_row(flat) : position;
    const std::byte* source = row < 0 ? nullptr : params.rows + row * params.row_pitch.bytes();
    arrange_row<StageDecoder<Traits>::kOrder>(source, params.depth,
                                              rows + slot * params.shared_pitch);
    if (lane_id() == 0) {
      const float scale =
          params.multiply && flat >= 0 ? params.template router_weight<__nv_bfloat16>(flat) : 1.0f;
      targets[slot] = {params.scatter ? flat : position, scale};
    }
  }
}

}  // namespace moegemm::cuda::sm80
