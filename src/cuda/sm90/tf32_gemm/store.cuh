#pragma once

#include "cuda/sm90/row_gemm/params.h"
#include "cuda/sm90/row_gemm/store.cuh"
#include "cuda/sm90/tf32_gemm/layout.cuh"

/// The epilogue of TF32 tiles: a thread has four neighbouring features of a row, eight lanes have
/// 128 bytes of it, so that results go straight from registers.
namespace moegemm::cuda::sm90 {

/// The features of a thread: `first` and so on, `step` apart.
struct OwnFeatures {
  int first;
  int step;
};

template <typename Traits>
__device__ __forceinline__ OwnFeatures own_features(const RowGemmParams& params, const Tile& tile) {
  const int index = ptx::thread_index();
  const int lane = index % kWarpSize;
  const int warp = index / kWarpSize % 4;
  const int consumer = index / kWarpgroupThreads - 1;
  const int first = tile.feature + consumer * Traits::kConsumerStep + warp * kWarpFeatures;
  if constexpr (!Traits::kDepthMajor) return {first + own_quad(lane) * kOwnFeatures, 1};
  // The tensor map puts neighbours eight rows of shared memory apart where it can.
  if (params.weights_in_slabs) return {first + lane / 4, 8};
  return {first + lane / 4 * kOwnFeatures, 1};
}

/// Accumulator of feature q in row 8 j + 2 * (lane % 4) + i.
template <int Count>
__device__ __forceinline__ float& result_of(float (&d)[2][Count], int q, int j, int i) {
  return d[q % 2][4 * j + q / 2 * 2 + i];
}

/// Adds the bias, multiplies by router weights and stores.
template <typename Traits, int Count>
__device__ __forceinline__ void store_tf32_results(const RowGemmParams& params,
                                                   const RowGemmShared<Traits>& shared,
                                                   const Tile& tile, int slot,
                                                   float (&d)[2][Count]) {
  constexpr int N = 2 * Count;
  const int lane = ptx::thread_index() % kWarpSize;
  const OwnFeatures own = own_features<Traits>(params, tile);
  // Not in a rehearsal, which runs before the launch ahead has ended: see LaunchStart.
  const bool counts = !Traits::kStreams || tile.rows > 0;
  if (params.bias && counts) {
    const float* bias = static_cast<const float*>(params.bias) + tile.expert * params.bias_stride;
    const int last = params.features - 1;  // features past it are not stored
#pragma unroll
    for (int q = 0; q < kOwnFeatures; ++q) {
      const float value = __ldg(bias + min(own.first + q * own.step, last));
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        result_of(d, q, j, 0) += value;
        result_of(d, q, j, 1) += value;
      }
    }
  }
  if (params.multiply) {
    scale_block<N>(d[0], shared.scales(slot), lane);
    scale_block<N>(d[1], shared.scales(slot), lane);
  }
  const RowTargets targets = row_targets(params, shared, tile, slot);
  float* const out = static_cast<float*>(params.out) + own.first;
  const bool vectors = params.vector_store && own.step == 1;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = targets(8 * j + 2 * (lane % 4) + i);
      if (row < 0) continue;
      float* const line = out + row * params.out_stride;
      if (vectors) {
        if (own.first < params.features) {
          *reinterpret_cast<float4*>(line) =
              make_float4(result_of(d, 0, j, i), result_of(d, 1, j, i), result_of(d, 2, j, i),
                          result_of(d, 3, j, i));
        }
      } else {
#pragma unroll
        for (int q = 0; q < kOwnFeatures; ++q) {
          if (own.first + q * own.step < params.features) {
            line[q * own.step] = result_of(d, q, j, i);
          }
        }
      }
    }
  }
}

}  // namespace moegemm::cuda::sm90
