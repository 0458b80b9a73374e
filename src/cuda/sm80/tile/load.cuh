#pragma once

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/sm80/tile/traits.h"

/// Device memory to shared memory in chunks of 16 bytes, of which elements past an edge become
/// zeros.
namespace moegemm::cuda::sm80 {

/// The first `valid` of eight 16-bit elements, the others zero. The pointer has any alignment that
/// its elements have.
__device__ __forceinline__ uint4 load_elements(const std::byte* source, int valid) {
  const auto* elements = reinterpret_cast<const unsigned short*>(source);
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned low = 2 * i < valid ? __ldg(elements + 2 * i) : 0;
    const unsigned high = 2 * i + 1 < valid ? __ldg(elements + 2 * i + 1) : 0;
    words[i] = low | high << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

/// Copies chunks i = 0 to Passes - 1 to target(i). source(i) is a chunk's
/// address, valid(i) how many of its elements exist: none or all when whole vectors are loaded.
template <typename Traits, int Passes, typename Target, typename Source, typename Valid>
__device__ __forceinline__ void copy_chunks(const Target& target, const Source& source,
                                            const Valid& valid) {
  if constexpr (Traits::kLoads == Loads::kVectors) {
#pragma unroll
    for (int i = 0; i < Passes; ++i) {
      ptx::cp_async_16_or_zero(target(i), source(i), valid(i) > 0);
    }
  } else if constexpr (Traits::kElementBytes == 4) {
#pragma unroll
    for (int i = 0; i < Passes; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        ptx::cp_async_4_or_zero(target(i) + j * 4, source(i) + j * 4, j < valid(i));
      }
    }
  } else {
    uint4 chunks[Passes];  // all loads in flight before the first store
#pragma unroll
    for (int i = 0; i < Passes; ++i) {
      chunks[i] = load_elements(source(i), valid(i));
    }
#pragma unroll
    for (int i = 0; i < Passes; ++i) {
      ptx::st_shared_16(target(i), chunks[i]);
    }
  }
}

}  // namespace moegemm::cuda::sm80
