#pragma once

#include "cuda/sm90/tf32_gemm/mma.cuh"
#include "cuda/sm90/tf32dw_gemm/load.cuh"

// clang-format off
/// dW_e = dY_e^T X_e of fp32 as TF32, all experts in one persistent launch.
///
/// | warps | role                          | registers | waits for              | signals                |
/// |-------|-------------------------------|-----------|------------------------|------------------------|
/// | 0     | schedule, boxes of A, B       | 88        | tile empty, load empty | tile full, load full   |
/// | 1-3   | B through registers           | 88        | tile full, load empty  | load full, tile empty  |
/// | 4-11  | A into registers, wgmma,      | 208       | tile full, load full   | load empty, tile empty |
/// |       | stores from registers         |           |                        |                        |
// clang-format on
namespace moegemm::cuda::sm90 {

/// The stages of a tile as multiply_turned reads them.
template <typename Traits>
class DwStages {
 public:
  __device__ __forceinline__ DwStages(Tf32dwShared<Traits>& shared, int group)
      : shared_(shared), offset_(turned_offset(group * Traits::kGroupCols / Traits::kSlabCols)) {}

  __device__ __forceinline__ int slot() const { return state_.slot; }
  __device__ __forceinline__ const std::byte* rows() const { return shared_.b[state_.slot]; }
  __device__ __forceinline__ void wait() { shared_.loads.wait_full(state_); }
  template <int Half>
  __device__ __forceinline__ void load(TurnedHalf& half) const {
    load_turned<Half>(shared_.a[state_.slot], offset_, half);
    const unsigned mask = shared_.masks[state_.slot];
    if (mask == ~0u) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows of the contraction that this lane has, four apart
      const int row = Half * 16 + i * 4 + static_cast<int>(threadIdx.x % 4);
      const bool counts = mask >> row & 1;
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        std::uint32_t* const a = half.a[i / 2][block] + i % 2 * 2;
        a[0] = counts ? a[0] : 0;
        a[1] = counts ? a[1] : 0;
      }
    }
  }
  __device__ __forceinline__ void advance() { state_.advance(); }
  __device__ __forceinline__ void release(int slot) {
    if (threadIdx.x % kWarpSize == 0) ptx::mbarrier_arrive(&shared_.loads.empty[slot]);
  }
  /// Lets the stages of a tile go by.
  __device__ __forceinline__ void skip(int stages) {
    for (int stage = 0; stage < stages; ++stage, advance()) {
      wait();
      release(slot());
    }
  }

 private:
  Tf32dwShared<Traits>& shared_;
  PipelineState<Traits::kStages> state_;
  int offset_;
};

template <typename Vector>
__device__ __forceinline__ void put(float* at, Vector value, bool add) {
  auto& target = *reinterpret_cast<Vector*>(at);
  if (add) {
    const Vector old = target;
    value.x += old.x;
    value.y += old.y;
    if constexpr (sizeof(Vector) == 16) {
      value.z += old.z;
      value.w += old.w;
    }
  }
  target = value;
}

/// A thread has four columns of A (see ../tf32_gemm/layout.cuh) and pairs of columns of B. Where A
/// is X, the four are 16 bytes of a row of dW; else the pairs of four lanes are 32 bytes.
template <typename Traits>
__device__ __forceinline__ void store_tile(const Tf32dwParams& params, const WeightTile& tile,
                                           int group, float (&d)[2][Traits::kBCols / 2]) {
  const int index = ptx::thread_index();
  const int lane = index % kWarpSize;
  const int a = tile.a_col + group * Traits::kGroupCols +
                index % kWarpgroupThreads / kWarpSize * kWarpFeatures +
                own_quad(lane) * kOwnFeatures;
  if (a >= params.a_cols) return;
  const int first = tile.b_col + lane % 4 * 2;
  float* const out = params.out + tile.expert * params.expert_stride;
  const bool add = params.accumulate;
  if (params.a_is_x) {
    float* line = out + first * params.out_stride + a;
#pragma unroll
    for (int j = 0; j < Traits::kBCols / 8; ++j) {
      if (first + 8 * j < params.b_cols) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          put(line + i * params.out_stride,
              make_float4(d[0][4 * j + i], d[1][4 * j + i], d[0][4 * j + 2 + i],
                          d[1][4 * j + 2 + i]),
              add);
        }
      }
      line += 8 * params.out_stride;
    }
  } else {
#pragma unroll
    for (int q = 0; q < kOwnFeatures; ++q) {
      float* const line = out + (a + q) * params.out_stride + first;
#pragma unroll
      for (int j = 0; j < Traits::kBCols / 8; ++j) {
        const float* pair = d[q % 2] + 4 * j + q / 2 * 2;
        if (first + 8 * j < params.b_cols) put(line + 8 * j, make_float2(pair[0], pair[1]), add);
      }
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void multiply_and_store(const Tf32dwParams& params,
                                                   Tf32dwShared<Traits>& shared) {
  const int group = ptx::uniform(threadIdx.x / kWarpgroupThreads - 1);
  DwStages<Traits> stages(shared, group);
  TileReader<Traits> tiles(shared);
  while (true) {
    const WeightTile tile = tiles.next();
    if (tile.is_end()) return;
    const int blocks = ceil_div(tile.rows, Traits::kRows);
    if (tile.a_col + group * Traits::kGroupCols >= params.a_cols) {
      stages.skip(blocks);
      continue;
    }
    float d[2][Traits::kBCols / 2];
    if (blocks > 0) {
      multiply_turned(d, stages, blocks);
    } else {
#pragma unroll
      for (auto& block : d) {
#pragma unroll
        for (float& value : block) value = 0;
      }
    }
    store_tile<Traits>(params, tile, group, d);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(kThreads, 1)
    tf32dw_gemm_kernel(const __grid_constant__ Tf32dwParams params) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  auto& shared = *reinterpret_cast<Tf32dwShared<Traits>*>(dynamic_shared);
  const int warp = ptx::uniform(threadIdx.x / kWarpSize);
  if (threadIdx.x == 0) {
    shared.loads.init(1 + kWarpgroupThreads, kConsumers * kWarpgroupWarps);
    shared.tile_ring.init(1, kThreads - kWarpSize);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&params.a_map);
  }
  __syncthreads();
  if (warp < kWarpgroupWarps) {
    ptx::setmaxnreg_dec<Traits::kProducerRegisters>();
    produce(params, shared, warp);
  } else {
    ptx::setmaxnreg_inc<Traits::kConsumerRegisters>();
    multiply_and_store(params, shared);
  }
}

template <Tf32dwGemm Kernel, DType D>
KernelFunctions tf32dw_gemm_functions() {
  static_assert(D == DType::kFloat32);
  return {.plain = reinterpret_cast<const void*>(&tf32dw_gemm_kernel<Tf32dwTraits<Kernel>>)};
}

}  // namespace moegemm::cuda::sm90
