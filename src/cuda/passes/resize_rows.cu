#include <algorithm>
#include <cstdint>

#include "cuda/backend/launch/launch.h"
#include "cuda/passes/passes.h"
#include "moegemm/error.h"

/// One warp per row, element by element: rows of one side begin anywhere.
namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct Stack {
  void* data;
  std::int64_t pitch;  // elements
  std::int64_t rows;   // of a matrix
  std::int64_t columns;
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    resize_kernel(const Stack from, const Stack to, std::int64_t count) {
  constexpr int kInFlight = 8;
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * kWarps + static_cast<std::int64_t>(threadIdx.x / 32);
  for (std::int64_t i = first; i < count; i += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    const std::int64_t matrix = i / to.rows;
    const std::int64_t row = i - matrix * to.rows;
    const std::int64_t copied = row < from.rows ? min(from.columns, to.columns) : 0;
    const T* const source =
        static_cast<const T*>(from.data) + (matrix * from.rows + row) * from.pitch;
    T* const target = static_cast<T*>(to.data) + i * to.pitch;
    for (std::int64_t column = threadIdx.x % 32; column < to.columns; column += 32 * kInFlight) {
      T values[kInFlight] = {};
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (column + 32 * j < copied) values[j] = source[column + 32 * j];
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (column + 32 * j < to.columns) target[column + 32 * j] = values[j];
      }
    }
  }
}

Stack stack_of(const TensorView& view) {
  return {view.data, view.row_stride, view.shape[1], view.shape[2]};
}

template <typename T>
void launch_elements(const TensorView& from, const TensorView& to, cudaStream_t stream) {
  constexpr std::int64_t kMostBlocks = 1 << 20;
  Stack source = stack_of(from);
  Stack target = stack_of(to);
  std::int64_t count = to.shape[0] * to.shape[1];
  const std::int64_t blocks = std::min((count + kWarps - 1) / kWarps, kMostBlocks);
  void* parameters[] = {&source, &target, &count};
  launch({reinterpret_cast<const void*>(&resize_kernel<T>), "resize_rows",
          dim3(static_cast<unsigned>(blocks)), dim3(kThreads)},
         parameters, stream);
}

}  // namespace

void CudaPasses::resize_rows(const TensorView& from, const TensorView& to,
                             const ExecutionContext& context) const {
  const PassLaunch on(to.device, context);
  if (to.shape[0] * to.shape[1] * to.shape[2] == 0) return;
  if (size_bytes(to.dtype) == 2) {
    launch_elements<std::uint16_t>(from, to, on.stream);
  } else {
    launch_elements<std::uint32_t>(from, to, on.stream);
  }
}

}  // namespace moegemm::cuda
