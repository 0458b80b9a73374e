#include <algorithm>
#include <cstdint>

#include "cuda/backend/launch/launch.h"
#include "cuda/passes/alignment.h"
#include "cuda/passes/elements.cuh"
#include "cuda/passes/passes.h"

/// One warp per row. Chunks are 16 bytes where every row allows it, else elements.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct GatherArguments {
  const void* rows;
  std::int64_t pitch;  // chunks
  void* gathered;
  std::int64_t gathered_pitch;
  IndexArray indices;
  std::int64_t count;
  std::int64_t flat_rows;  // indices are below it
  std::int64_t divisor;
  std::int64_t chunks;  // of a row
};

template <typename Chunk>
__global__ void __launch_bounds__(kThreads) gather_kernel(const GatherArguments a) {
  constexpr int kInFlight = 4;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= a.count) return;
  const std::int64_t flat = load_index(a.indices.data, a.indices.is_64_bit, row);
  const bool named = flat >= 0 && flat < a.flat_rows;
  const Chunk* const source =
      static_cast<const Chunk*>(a.rows) + (named ? flat / a.divisor : 0) * a.pitch;
  Chunk* const target = static_cast<Chunk*>(a.gathered) + row * a.gathered_pitch;
  for (std::int64_t first = threadIdx.x % 32; first < a.chunks; first += 32 * kInFlight) {
    Chunk chunks[kInFlight] = {};
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (named && first + 32 * i < a.chunks) chunks[i] = source[first + 32 * i];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + 32 * i < a.chunks) target[first + 32 * i] = chunks[i];
    }
  }
}

template <typename Chunk>
void launch_chunks(const TensorView& rows, const TensorView& indices, std::int64_t divisor,
                   const TensorView& gathered, const char* name, cudaStream_t stream) {
  const auto chunks = [&rows](std::int64_t elements) {
    return elements * size_bytes(rows.dtype) / static_cast<std::int64_t>(sizeof(Chunk));
  };
  GatherArguments arguments = {
      .rows = rows.data,
      .pitch = chunks(rows.row_stride),
      .gathered = gathered.data,
      .gathered_pitch = chunks(gathered.row_stride),
      .indices = indices_of(indices),
      .count = gathered.shape[0],
      .flat_rows = rows.shape[0] * divisor,
      .divisor = divisor,
      .chunks = chunks(rows.shape[1]),
  };
  void* parameters[] = {&arguments};
  launch({reinterpret_cast<const void*>(&gather_kernel<Chunk>), name,
          dim3(static_cast<unsigned>((arguments.count + kWarps - 1) / kWarps)), dim3(kThreads)},
         parameters, stream);
}

}  // namespace

void CudaPasses::gather_rows(const TensorView& rows, const TensorView& gather_indices,
                             std::int64_t divisor, const TensorView& gathered,
                             const ExecutionContext& context) const {
  const PassLaunch on(rows.device, context);
  if (gathered.shape[0] == 0 || gathered.shape[1] == 0) return;
  const std::int64_t element = size_bytes(rows.dtype);
  if (is_16_byte_aligned(rows) && is_16_byte_aligned(gathered) &&
      rows.shape[1] * element % 16 == 0) {
    launch_chunks<uint4>(rows, gather_indices, divisor, gathered, "gather_rows (16 bytes)",
                         on.stream);
  } else if (element == 2) {
    launch_chunks<std::uint16_t>(rows, gather_indices, divisor, gathered, "gather_rows (2 bytes)",
                                 on.stream);
  } else {
    launch_chunks<std::uint32_t>(rows, gather_indices, divisor, gathered, "gather_rows (4 bytes)",
                                 on.stream);
  }
}

}  // namespace moegemm::cuda
