#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/ptx/wgmma_tf32.cuh"
#include "cuda/sm90/row_gemm/load.cuh"

/// Gathered rows of TF32 tiles. The copy engine rounds what it copies; cp.async does not. So
/// producer threads take gathered rows through registers and round them on the way.
namespace moegemm::cuda::sm90 {

__device__ __forceinline__ uint4 round_to_tf32(const uint4& bits) {
  return {ptx::round_to_tf32(bits.x), ptx::round_to_tf32(bits.y), ptx::round_to_tf32(bits.z),
          ptx::round_to_tf32(bits.w)};
}

/// The rows of one gathered tile that a thread copies: one 16-byte chunk of every 16th row.
template <typename Traits>
class RoundedRows {
 public:
  static constexpr int kStep = 16;
  static constexpr int kCount = Traits::kRows / kStep;
  static constexpr unsigned kNoRow = 0xffffffffu;

  __device__ __forceinline__ void locate(const RowGemmParams& params, const Tile& tile,
                                         int thread) {
    int flat[kCount];  // all loads in flight before the first use
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = thread / 8 + i * kStep;
      flat[i] = -1;
      if (row < tile.rows) {
        flat[i] = params.gather_indices.fetch(tile.row + row).below(params.flat_rows);
      }
    }
    const auto pitch = static_cast<unsigned>(params.row_bytes / 16);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const unsigned source = params.divisor.divide(static_cast<unsigned>(max(flat[i], 0)));
      starts_[i] = flat[i] < 0 ? kNoRow : source * pitch;
    }
  }

  /// The thread's 16 bytes of row `i`; `columns` is where they are in row 0. Zeros where there is
  /// no such row and where `inside` does not hold.
  __device__ __forceinline__ uint4 load(int i, const std::byte* columns, bool inside) const {
    const auto* at = reinterpret_cast<const uint4*>(columns + starts_[i] * 16ull);
    return inside && starts_[i] != kNoRow ? __ldg(at) : uint4{};
  }

 private:
  unsigned starts_[kCount];  ///< of the rows, in chunks of 16 bytes
};

/// Every stage of one gathered tile. A thread holds a stage of its part of high tiles; of low ones,
/// whose stages are few bytes, several. When all is stored it requests the stage that comes as
/// many later: with a request after each store Qwen3-30B fwd1 had 0.58 of dense TF32 instead of
/// 0.74.
template <typename Traits>
__device__ __forceinline__ void load_rounded_tile(const RowGemmParams& params,
                                                  const RowGemmShared<Traits>& shared,
                                                  const Tile& tile, const RoundedRows<Traits>& rows,
                                                  PipelineState<Traits::kStages>& stage) {
  using Rows = RoundedRows<Traits>;
  constexpr int kAhead = Rows::kCount <= 4 ? 4 : 1;
  constexpr int kStep = Traits::kStageDepth;
  const int thread = threadIdx.x;  // of the first warpgroup
  auto& ring = shared.rings().stage;
  const std::byte* columns = params.rows + thread % 8 * 16;
  const auto inside = [&](int depth) {  // whether the thread's chunk of that stage is
    return depth + static_cast<int>(threadIdx.x) % 8 * 4 < params.depth;
  };
  uint4 flight[kAhead][Rows::kCount];
#pragma unroll
  for (int i = 0; i < kAhead; ++i, columns += kRowBytes) {
#pragma unroll
    for (int row = 0; row < Rows::kCount; ++row) {
      flight[i][row] = rows.load(row, columns, inside(i * kStep));
    }
  }
#pragma unroll 1
  for (int depth = 0; depth < params.depth;) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i, depth += kStep, columns += kRowBytes) {
      if (kAhead > 1 && depth >= params.depth) break;
      ring.wait_empty(stage);
      std::uint64_t* full = &ring.full[stage.slot];
      if (thread == 0) {
        ptx::mbarrier_arrive_expect_tx(full, Traits::kWeightBytes);
        load_weights<Traits>(params, &params.weights_map, tile, depth, shared.weights(stage.slot),
                             full);
      }
      const bool more = inside(depth + kAhead * kStep);
      const std::uint32_t target =
          ptx::shared_address(shared.rows(stage.slot)) + swizzle_128b(thread / 8, thread % 8);
#pragma unroll
      for (int row = 0; row < Rows::kCount; ++row) {
        ptx::st_shared_16(target + row * Rows::kStep * kRowBytes, round_to_tf32(flight[i][row]));
      }
#pragma unroll
      for (int row = 0; row < Rows::kCount; ++row) {
        flight[i][row] = rows.load(row, columns, more);
      }
      ptx::fence_proxy_async_shared();  // wgmma reads through the async proxy
      ptx::mbarrier_arrive(full);
      stage.advance();
    }
  }
  load_gathered_low_rank(params, shared, tile, stage);
}

}  // namespace moegemm::cuda::sm90
