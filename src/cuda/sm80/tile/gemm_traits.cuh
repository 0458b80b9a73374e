#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/sm80/tile/block_shape.h"

namespace moegemm::cuda::sm80 {

/// Everything that changes the inner loop of a kernel.
template <typename Shape_, typename Element_, Math Math_, Major AMajor_, Major BMajor_,
          Loads Loads_>
struct GemmTraits {
  using Shape = Shape_;
  using Element = Element_;
  static constexpr Math kMath = Math_;
  static constexpr Major kAMajor = AMajor_;
  static constexpr Major kBMajor = BMajor_;
  static constexpr Loads kLoads = Loads_;
  static constexpr int kElementBytes = sizeof(Element);
  static constexpr int kDepth = Shape::template depth<kElementBytes>();  ///< of one stage
  static constexpr int kChunkElements = kChunkBytes / kElementBytes;
  static constexpr int kABytes = Shape::kRows * kElementBytes;  ///< of one depth, outer major
  static constexpr int kBBytes = Shape::kCols * kElementBytes;
  /// Stages hold B's columns in the order of placed_column. Where they are contiguous, chunks of
  /// eight columns cannot be taken apart.
  static constexpr bool kPlacedColumns = kElementBytes == 2 && kBMajor == Major::kDepth;
  static_assert((kMath == Math::kTensor16) == (kElementBytes == 2));
};

/// The accumulators of one thread: [row block][column block], as mma.sync lays them out.
template <typename Traits>
using Accumulators = float[Traits::Shape::kRowBlocks][Traits::Shape::kColBlocks][4];

/// Calls f.operator()<0>() to f.operator()<Count - 1>().
template <int Count, int First = 0, typename Function>
__device__ __forceinline__ void static_for(const Function& f) {
  if constexpr (First < Count) {
    f.template operator()<First>();
    static_for<Count, First + 1>(f);
  }
}

}  // namespace moegemm::cuda::sm80
