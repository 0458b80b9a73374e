#include <algorithm>
#include <cstdint>

#include "cuda/backend/device_facts.h"
#include "cuda/backend/error.h"
#include "cuda/backend/launch/launch.h"
#include "cuda/backend/launch/segment_params.h"
#include "cuda/device/warp.h"
#include "cuda/passes/alignment.h"
#include "cuda/passes/block_sums.cuh"
#include "cuda/passes/elements.cuh"
#include "cuda/passes/passes.h"

/// Rows that are in no segment become zero. A block looks after some consecutive rows: its threads
/// mark those that a segment has, each for some experts, and its warps zero the others.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMostWords = 32;  ///< of marks: a bit for each of a block's rows

struct GapArguments {
  SegmentParams segments;
  void* out;
  std::int64_t pitch;  // bytes
  std::int64_t bytes;  // of a row
  int rows;
  int rows_of_block;  // a multiple of 32
  bool by_16_bytes;
};

template <typename Unit>
__device__ void zero_bytes(void* row, std::int64_t bytes) {
  for (std::int64_t i = threadIdx.x % 32; i < bytes / static_cast<int>(sizeof(Unit)); i += 32) {
    static_cast<Unit*>(row)[i] = Unit{};
  }
}

__global__ void __launch_bounds__(kThreads) zero_gap_rows(const GapArguments a) {
  __shared__ unsigned marks[kMostWords];
  const int first = static_cast<int>(blockIdx.x) * a.rows_of_block;
  const int count = min(a.rows_of_block, a.rows - first);
  if (threadIdx.x < kMostWords) marks[threadIdx.x] = 0;
  __syncthreads();
  const Placement& placement = a.segments.placement;
  const bool packed = !placement.given();
  const int routed =
      packed
          ? static_cast<int>(block_routed_rows(
                a.segments.m_sizes.data, a.segments.m_sizes.is_64_bit, a.segments.experts, a.rows))
          : 0;
  // Segments that follow one another are one.
  const int segments = packed ? 1 : a.segments.experts;
  for (int e = static_cast<int>(threadIdx.x); e < segments; e += kThreads) {
    const int begin = (packed ? 0 : placement.begin(e)) - first;
    const int end = begin + (packed ? routed : placement.size(e, a.segments.m_sizes[e]));
    for (int word = max(begin, 0) / 32; word * 32 < min(end, count); ++word) {
      const int low = max(begin - word * 32, 0), high = min(end - word * 32, 32);
      atomicOr(&marks[word], (high == 32 ? kFullMask : (1u << high) - 1) & kFullMask << low);
    }
  }
  __syncthreads();
  for (int row = static_cast<int>(threadIdx.x) / 32; row < count; row += kWarps) {
    if (marks[row / 32] >> row % 32 & 1) continue;
    void* const line = static_cast<char*>(a.out) + (first + row) * a.pitch;
    a.by_16_bytes ? zero_bytes<uint4>(line, a.bytes) : zero_bytes<unsigned short>(line, a.bytes);
  }
}

}  // namespace

void CudaPasses::zero_gaps(const TensorView& out, const RoutingView& routing,
                           const ExecutionContext& context) const {
  const PassLaunch on(out.device, context);
  const std::int64_t rows = out.shape[0], element = size_bytes(out.dtype);
  const std::int64_t bytes = out.shape[1] * element, pitch = out.row_stride * element;
  if (rows == 0 || bytes == 0) return;
  if (!routing.m_sizes.given()) {
    cuda::check(cudaMemset2DAsync(out.data, static_cast<std::size_t>(pitch), 0,
                                  static_cast<std::size_t>(bytes), static_cast<std::size_t>(rows),
                                  on.stream),
                "zero an output");
    return;
  }
  // Four blocks on a multiprocessor hide each other's look at the segments.
  const std::int64_t blocks = 4 * device_facts(out.device.index)->multiprocessors;
  const std::int64_t words = std::clamp<std::int64_t>((rows / blocks + 31) / 32, 1, kMostWords);
  GapArguments arguments = {.segments = segment_params(routing, rows, 0),
                            .out = out.data,
                            .pitch = pitch,
                            .bytes = bytes,
                            .rows = static_cast<int>(rows),
                            .rows_of_block = static_cast<int>(words * 32),
                            .by_16_bytes = is_16_byte_aligned(out) && bytes % 16 == 0};
  void* parameters[] = {&arguments};
  launch({reinterpret_cast<const void*>(&zero_gap_rows), "zero_gaps",
          dim3(static_cast<unsigned>((rows + words * 32 - 1) / (words * 32))), dim3(kThreads)},
         parameters, on.stream);
}

}  // namespace moegemm::cuda
