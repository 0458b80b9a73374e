#pragma once

#include "cuda/device/segment_scan.cuh"
#include "cuda/sm80/stream_gemm/store.cuh"

// clang-format off
/// Forward with quantised weights and few rows for each expert, where nothing but reading W takes
/// time: out[rows of expert e] = rows W_e^T. W lies on mma.sync's M side, rows on its N side. One
/// block on a multiprocessor takes an equal share of all tiles (16 features of one expert) and holds
/// the rows that they are multiplied with.
///
/// | warps | role                                  | waits for                    | signals        |
/// |-------|---------------------------------------|------------------------------|----------------|
/// | all   | each its own tiles: cp.async into its | its own copies               | nobody         |
/// |       | ring, decode, mma.sync, store         |                              |                |
/// | all   | rows of the next tiles, once or, if   | all tiles whose rows must go | all warps, by  |
/// |       | they are many, several times          | (2 barriers)                 | the barriers   |
/// | 0     | also decides which rows               |                              |                |
///
/// A warp's copies run ahead into its next tiles, whatever rows they need.
// clang-format on
namespace moegemm::cuda::sm80 {

template <typename Traits>
struct StreamShared {
  using Layout = StreamLayout<Traits>;
  std::byte* base;

  __device__ __forceinline__ std::byte* ring() const {
    return base + warp_id() * Traits::kStages * kStreamStageBytes;
  }
  __device__ __forceinline__ std::byte* table() const {
    return base + Layout::kTables + warp_id() * Traits::kTableBytes;
  }
  __device__ __forceinline__ StreamPhase* phases() const {
    return reinterpret_cast<StreamPhase*>(base + Layout::kPhases);
  }
  __device__ __forceinline__ StreamBatch* batch() const {
    return reinterpret_cast<StreamBatch*>(base + Layout::kBatch);
  }
  __device__ __forceinline__ StreamTarget* targets() const {
    return reinterpret_cast<StreamTarget*>(base + Layout::kTargets);
  }
  __device__ __forceinline__ SegmentStart* starts() const {
    return reinterpret_cast<SegmentStart*>(base + Layout::kStarts);
  }
  __device__ __forceinline__ std::byte* rows(int experts) const {
    return base + Layout::rows(experts);
  }
};

/// The next tile of a warp, of N blocks of eight rows.
template <typename Traits, int N>
__device__ __forceinline__ void compute_stream_tile(const StreamGemmParams& params,
                                                    const StreamShared<Traits>& shared,
                                                    const StreamPhase& phase, int feature,
                                                    WeightStream<Traits>& stream,
                                                    StageDecoder<Traits>& decoder) {
  const std::uint32_t first = ptx::shared_address(shared.rows(params.experts));
  std::uint32_t rows[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    // Rows that do not exist are another one, whose results nobody stores twice.
    const int row = phase.slot + min(8 * i + lane_id() / 4, phase.rows - 1);
    rows[i] = first + row * params.shared_pitch + lane_id() % 4 * 16;
  }
  StreamSums<N> sums = {};
#pragma unroll 1
  for (int number = 0; number * kStreamRowBytes < params.weight_bytes; ++number) {
    const std::uint32_t stage = stream.next(decoder, number);
    const int left = static_cast<int>(params.weight_bytes) - number * kStreamRowBytes;
    const StageProduct<Traits, N> product(decoder, stage, rows, sums);
    if (decoder.rare()) {
      product.template multiply_part<true>(min(left, kStreamRowBytes));
    } else if (N > 2 || left < kStreamRowBytes) {
      // Many rows: registers are short, and loads count more than what is decoded.
      product.template multiply_part<false>(min(left, kStreamRowBytes));
    } else {
      product.multiply();
    }
#pragma unroll
    for (int i = 0; i < N; ++i) rows[i] += Traits::kStageDepth * 2;
  }
  if (params.low_rank > 0) multiply_low_rank<N>(params, phase, feature, sums);
  store_sums<N>(params, phase, shared.targets(), feature, sums);
}

/// The tiles of a batch that are this warp's, from `tile` on.
template <typename Traits>
__device__ __forceinline__ int compute_batch(const StreamGemmParams& params,
                                             const StreamShared<Traits>& shared, int tile,
                                             WeightStream<Traits>& stream,
                                             StageDecoder<Traits>& decoder) {
  const int tile_end = shared.batch()->tile_end;
  int number = 0;
#pragma unroll 1
  for (; tile < tile_end; tile += Traits::kWarps) {
    while (shared.phases()[number].tile_end <= tile) ++number;
    const StreamPhase& phase = shared.phases()[number];  // read again, no registers keep it
    const int feature = column_of_tile(params, tile - shared.starts()[phase.expert].tile);
    if (phase.rows <= 8) {
      compute_stream_tile<Traits, 1>(params, shared, phase, feature, stream, decoder);
    } else if (phase.rows <= 16) {
      compute_stream_tile<Traits, 2>(params, shared, phase, feature, stream, decoder);
    } else if constexpr (Traits::kRows > 16) {
      compute_stream_tile<Traits, 4>(params, shared, phase, feature, stream, decoder);
    }
  }
  return tile;
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    stream_gemm_kernel(const __grid_constant__ StreamGemmParams params) {
  using Layout = StreamLayout<Traits>;
  extern __shared__ __align__(1024) std::byte memory[];
  const StreamShared<Traits> shared = {memory};
  if (warp_id() < kStreamScanWarps) {
    scan_segments<kStreamScanWarps, Traits::kThreads>(
        params, TileStarts{shared.starts(), params.tile_rows, params.column_tiles},
        reinterpret_cast<SegmentStart*>(memory + Layout::kScan), kStreamBarrier);
  } else {
    attend_scan<kStreamScanWarps, Traits::kThreads>(params, kStreamBarrier);
  }
  __syncthreads();
  const long long tiles = shared.starts()[params.experts].tile;
  const int first = static_cast<int>(tiles * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(tiles * (blockIdx.x + 1) / gridDim.x);
  int tile = first + warp_id();
  LoadedScales<Traits::kFormat> scales;
  WeightStream<Traits> stream(params, shared.starts(), shared.ring(), tile, end, scales);
  StageDecoder<Traits> decoder(shared.table());
  if (params.zeroed_rows > 0) zero_other_rows<Traits>(params, memory);
  if (first == end) return;
  const auto next_batch = [&](int begin) {
    if (warp_id() == 0) {
      plan_batch(params, shared.starts(), begin, end, shared.phases(), shared.batch());
    }
    __syncthreads();
    load_rows<Traits>(params, *shared.batch(), shared.phases(), shared.targets(),
                      shared.rows(params.experts));
    __syncthreads();
  };
  next_batch(first);
  decoder.prime(params, scales);
#pragma unroll 1
  while (true) {
    tile = compute_batch<Traits>(params, shared, tile, stream, decoder);
    const int begin = shared.batch()->tile_end;
    if (begin >= end) return;
    __syncthreads();
    next_batch(begin);
  }
}

template <StreamGemm Kernel, DType D>
KernelFunctions stream_gemm_functions() {
  static_assert(Kernel.op == Op::kForward && D == DType::kBFloat16);
  return {.plain = reinterpret_cast<const void*>(&stream_gemm_kernel<StreamTraits<Kernel>>)};
}

}  // namespace moegemm::cuda::sm80
