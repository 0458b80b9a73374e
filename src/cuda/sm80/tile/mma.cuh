#pragma once

#include "cuda/ptx/mma_sync.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/sm80/tile/lanes.cuh"
#include "cuda/sm80/tile/stage.h"
#include "cuda/sm80/tile/traits.h"

/// The main loop: one output tile of a thread block, block of depth after block of depth.
///
/// Every result is one contraction in one order, whatever the tile, its height or the way operands
/// are loaded: the tensor cores take 16 (TF32: 8) depths at a time from the first to the last, and
/// fp32 goes depth by depth.
namespace moegemm::cuda::sm80 {

/// From a stage in shared memory to the registers of mma.sync. A step is 32 bytes of the
/// contraction: 16 elements of 16 bits, 8 of 32.
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
  // Stages are aligned so that the bits of an XOR are the lane's alone (stage.h).
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

template <typename Traits, int RowBlocks>
__device__ __forceinline__ void multiply_step(Accumulators<Traits>& acc,
                                              const Fragments<Traits, RowBlocks>& f) {
#pragma unroll
  for (int j = 0; j < Traits::Shape::kColBlocks; ++j) {
#pragma unroll
    for (int ii = 0; ii < RowBlocks; ++ii) {
      // Back and forth: neighbouring instructions share an operand. Along the rows first: 1 %
      // faster than along the columns on an H200.
      const int i = j % 2 == 0 ? ii : RowBlocks - 1 - ii;
      if constexpr (Traits::kMath == Math::kTf32) {
        ptx::mma_m16n8k8_tf32(acc[i][j], f.a[i], f.b[j]);
      } else {
        ptx::mma_m16n8k16(acc[i][j], f.a[i], f.b[j], typename Traits::Element{});
      }
    }
  }
}

/// Tensor cores. Fragments are read one step ahead, across the border of stages too. `feed` hands
/// out full stages and fills free ones, a part of a stage in every step.
template <typename Traits, int RowBlocks, bool Scaled, typename Feed>
__device__ __forceinline__ void multiply_tensor(Accumulators<Traits>& acc, Feed& feed, int blocks) {
  constexpr int kSteps = Traits::Shape::kDepthBytes / 32;
  static_assert(kSteps % 2 == 0, "the two sets of fragments are told apart at compile time");
  const FragmentReader<Traits, RowBlocks> reader;
  Fragments<Traits, RowBlocks> f[2];
  feed.wait();
  reader.template load<Scaled>(f[0], feed.stage_address(), 0, feed.scales());
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    feed.begin_fill();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      feed.template fill_part<kSteps>(step);
      if (step + 1 < kSteps) {
        reader.template load<Scaled>(f[(step + 1) % 2], feed.stage_address(), step + 1,
                                     feed.scales());
      } else {
        feed.end_fill();
        feed.advance();
        if (block + 1 < blocks) {
          feed.wait();
          reader.template load<Scaled>(f[0], feed.stage_address(), 0, feed.scales());
        }
      }
      multiply_step<Traits, RowBlocks>(acc, f[step % 2]);
    }
  }
}

/// The same where the feed decodes a stage while it waits: that takes registers, so no fragments
/// are held meanwhile, and much code, so there is one place for it. Other blocks on the
/// multiprocessor multiply in that time.
template <typename Traits, int RowBlocks, typename Feed>
__device__ __forceinline__ void multiply_decoded(Accumulators<Traits>& acc, Feed& feed,
                                                 int blocks) {
  constexpr int kSteps = Traits::Shape::kDepthBytes / 32;
  const FragmentReader<Traits, RowBlocks> reader;
  Fragments<Traits, RowBlocks> f[2];
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    feed.wait();
    feed.begin_fill();
    feed.template fill_part<1>(0);
    feed.end_fill();
    reader.template load<false>(f[0], feed.stage_address(), 0, nullptr);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) {
        reader.template load<false>(f[(step + 1) % 2], feed.stage_address(), step + 1, nullptr);
      }
      multiply_step<Traits, RowBlocks>(acc, f[step % 2]);
    }
    feed.advance();
  }
}

/// The same with a feed that others fill. What stands between two stages costs the tensor cores
/// nothing then: the next stage is looked at two steps early, and with the last block apart no
/// branch keeps the reads of its first fragments from spreading among multiplications. 0.7 % faster
/// than the above on an H200 (Mixtral-8x7B dx1), 1.1 % (fwd1).
template <typename Traits, int RowBlocks, bool Scaled, typename Feed>
__device__ __forceinline__ void multiply_stream(Accumulators<Traits>& acc, Feed& feed, int blocks) {
  constexpr int kSteps = Traits::Shape::kDepthBytes / 32;
  static_assert(kSteps % 2 == 0 && kSteps >= 4);
  const FragmentReader<Traits, RowBlocks> reader;
  Fragments<Traits, RowBlocks> f[2];
  const auto load = [&](int step) {
    reader.template load<Scaled>(f[step % 2], feed.stage_address(), step, feed.scales());
  };
  feed.wait();
  load(0);
#pragma unroll 1
  for (int block = 1; block < blocks; ++block) {
    bool next_is_full = false;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) {
        load(step + 1);
        if (step + 3 == kSteps) next_is_full = feed.next_is_full();
      } else {
        if (!next_is_full) feed.wait_for_next();
        feed.advance();
        load(0);
      }
      multiply_step<Traits, RowBlocks>(acc, f[step % 2]);
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) {
      load(step + 1);
    } else {
      feed.advance();
    }
    multiply_step<Traits, RowBlocks>(acc, f[step % 2]);
  }
}

/// Adds `blocks` blocks of depth, at least one, to the first RowBlocks row blocks of the
/// accumulators. `Scaled`: A's depths are scaled by the feed's factors.
template <typename Traits, int RowBlocks, bool Scaled, typename Feed>
__device__ __forceinline__ void multiply_tile(Accumulators<Traits>& acc, Feed& feed, int blocks) {
  if constexpr (Traits::Shape::kLoadWarps > 0) {
    multiply_stream<Traits, RowBlocks, Scaled>(acc, feed, blocks);
  } else if constexpr (Traits::kQuantised) {
    multiply_decoded<Traits, RowBlocks>(acc, feed, blocks);
  } else {
    multiply_tensor<Traits, RowBlocks, Scaled>(acc, feed, blocks);
  }
}

template <typename Traits>
__device__ __forceinline__ void clear(Accumulators<Traits>& acc) {
#pragma unroll
  for (auto& row : acc) {
#pragma unroll
    for (auto& block : row) {
#pragma unroll
      for (float& value : block) value = 0.0f;
    }
  }
}

}  // namespace moegemm::cuda::sm80
