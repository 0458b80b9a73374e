#pragma once

#include "cuda/ptx/mma_sync.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/sm80/tile/gemm_traits.cuh"
#include "cuda/sm80/tile/operand_tile.h"

/// From a stage in shared memory to the registers of mma.sync. A step is 32 bytes of the
/// contraction: 16 elements of 16 bits, 8 of 32.
namespace moegemm::cuda::sm80 {

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarpThreads; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / kWarpThreads; }

/// Where a warp's part of the tile begins. With fewer row blocks the warps' parts stay adjacent.
template <typename Shape>
__device__ __forceinline__ int warp_row(int row_blocks) {
  return warp_id() / Shape::kWarpCols * row_blocks * 16;
}
template <typename Shape>
__device__ __forceinline__ int warp_col() {
  return warp_id() % Shape::kWarpCols * Shape::kColBlocks * 8;
}

/// The first of the two columns of column block j that this lane accumulates, relative to the
/// warp's.
template <typename Traits>
__device__ __forceinline__ int lane_col(int j) {
  const int t = lane_id() % 4;
  return Traits::kPlacedColumns ? j / 4 * 32 + t * 8 + j % 4 * 2 : j * 8 + t * 2;
}

template <typename Traits, int RowBlocks>
struct Fragments {
  std::uint32_t a[RowBlocks][4];
  std::uint32_t b[Traits::Shape::kColBlocks][2];
};

/// The two elements of a register times their rows' scales, rounded to the element type again.
template <typename Element>
__device__ __forceinline__ std::uint32_t scale_pair(std::uint32_t pair, const float2& scale) {
  const auto* elements = reinterpret_cast<const Element*>(&pair);
  const Element low = static_cast<Element>(static_cast<float>(elements[0]) * scale.x);
  const Element high = static_cast<Element>(static_cast<float>(elements[1]) * scale.y);
  return reinterpret_cast<const std::uint16_t&>(low) |
         std::uint32_t{reinterpret_cast<const std::uint16_t&>(high)} << 16;
}

/// A thread's view of the operands in a stage.
template <typename Traits, int RowBlocks>
class FragmentReader {
  using Shape = typename Traits::Shape;
  static constexpr int kDepthBytes = Shape::kDepthBytes;
  static constexpr bool kWords = Traits::kElementBytes == 4;
  static constexpr int kABytes = Traits::kABytes;
  static constexpr int kBBytes = Traits::kBBytes;
  static constexpr int kStepDepth = 32 / Traits::kElementBytes;
  // Blocks are told apart by XOR: a warp's part must be a power of two.
  static_assert(Traits::kAMajor == Major::kDepth || (RowBlocks & (RowBlocks - 1)) == 0);

 public:
  __device__ __forceinline__ FragmentReader() {
    const int lane = lane_id();
    const int row = warp_row<Shape>(RowBlocks);
    const int col = warp_col<Shape>();
    if constexpr (Traits::kAMajor == Major::kDepth) {
      a_lane_ = a_depth_lane<kDepthBytes>(lane) + depth_block<kDepthBytes>(row);
    } else if constexpr (kWords) {
      a_lane_ = word_outer_lane<kABytes>(lane, row / 4);
    } else {
      a_lane_ = a_outer_lane<kABytes>(lane, row / 8);
    }
    if constexpr (Traits::kBMajor == Major::kDepth) {
      b_lane_ = b_depth_lane<kDepthBytes>(lane) + depth_block<kDepthBytes>(col);
    } else if constexpr (kWords) {
      b_lane_ = word_outer_lane<kBBytes>(lane, col / 4);
    } else {
      b_lane_ = b_outer_lane<kBBytes>(lane, col / 8);
    }
    a_lane_ = ptx::keep(a_lane_);
    b_lane_ = ptx::keep(b_lane_ + Shape::kRowsBytes);
  }

  /// Step `step` of the stage at `stage`. `Scaled`: A times `scales`, those of the stage's depths.
  template <bool Scaled>
  __device__ __forceinline__ void load(Fragments<Traits, RowBlocks>& f, std::uint32_t stage,
                                       int step, const float* scales) const {
    load_a(f, stage + a_lane_, step);
    if constexpr (Scaled) scale_a(f, scales + step * kStepDepth);
    load_b(f, stage + b_lane_, step);
    if constexpr (kWords) round_to_tf32(f);
  }

 private:
  // Stages are aligned so that the bits of an XOR are the lane's alone (operand_tile.h).
  static_assert(Shape::kStageBytes % kStageAlignment == 0 &&
                Shape::kRowsBytes % kStageAlignment == 0);

  static __device__ __forceinline__ void load_a(Fragments<Traits, RowBlocks>& f, std::uint32_t lane,
                                                int step) {
#pragma unroll
    for (int i = 0; i < RowBlocks; ++i) {
      auto& a = f.a[i];
      if constexpr (Traits::kAMajor == Major::kDepth) {
        ptx::ldmatrix_x4((lane ^ depth_step(step)) + depth_block<kDepthBytes>(i * 16), a[0], a[1],
                         a[2], a[3]);
      } else if constexpr (kWords) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // outer g or g + 8, depth t or t + 4
          a[j] = ptx::ld_shared_4((lane ^ outer_block(2 * i + j % 2)) +
                                  (step * 8 + j / 2 * 4) * kABytes);
        }
      } else {
        ptx::ldmatrix_x4_trans((lane ^ outer_block(i)) + step * 16 * kABytes, a[0], a[1], a[2],
                               a[3]);
      }
    }
  }

  static __device__ __forceinline__ void load_b(Fragments<Traits, RowBlocks>& f, std::uint32_t lane,
                                                int step) {
#pragma unroll
    for (int j = 0; j < Shape::kColBlocks; j += 2) {
      auto& low = f.b[j];
      auto& high = f.b[j + 1];
      if constexpr (Traits::kBMajor == Major::kDepth) {
        ptx::ldmatrix_x4((lane ^ depth_step(step)) + depth_block<kDepthBytes>(j * 8), low[0],
                         low[1], high[0], high[1]);
      } else if constexpr (kWords) {
        const int depth = step * 8 * kBBytes;
        low[0] = ptx::ld_shared_4((lane ^ outer_block(j)) + depth);
        low[1] = ptx::ld_shared_4((lane ^ outer_block(j)) + depth + 4 * kBBytes);
        high[0] = ptx::ld_shared_4((lane ^ outer_block(j + 1)) + depth);
        high[1] = ptx::ld_shared_4((lane ^ outer_block(j + 1)) + depth + 4 * kBBytes);
      } else {
        ptx::ldmatrix_x4_trans((lane ^ outer_block(j / 2)) + step * 16 * kBBytes, low[0], low[1],
                               high[0], high[1]);
      }
    }
  }

  static __device__ __forceinline__ void scale_a(Fragments<Traits, RowBlocks>& f,
                                                 const float* scales) {
    const int t = lane_id() % 4;
#pragma unroll
    for (int i = 0; i < RowBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kWords) {
          f.a[i][j] = __float_as_uint(__uint_as_float(f.a[i][j]) * scales[t + j / 2 * 4]);
        } else {
          const float2 pair = {scales[2 * t + j / 2 * 8], scales[2 * t + j / 2 * 8 + 1]};
          f.a[i][j] = scale_pair<typename Traits::Element>(f.a[i][j], pair);
        }
      }
    }
  }

  static __device__ __forceinline__ void round_to_tf32(Fragments<Traits, RowBlocks>& f) {
#pragma unroll
    for (auto& a : f.a) {
#pragma unroll
      for (auto& word : a) word = ptx::cvt_rna_tf32(word);
    }
#pragma unroll
    for (auto& b : f.b) {
#pragma unroll
      for (auto& word : b) word = ptx::cvt_rna_tf32(word);
    }
  }

  std::uint32_t a_lane_;  ///< offset in a stage of what this lane reads
  std::uint32_t b_lane_;
};

}  // namespace moegemm::cuda::sm80
