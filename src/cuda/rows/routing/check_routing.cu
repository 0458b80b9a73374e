#include <algorithm>

#include "cuda/host/error.h"
#include "cuda/host/launch.h"
#include "cuda/rows/block_sums.cuh"
#include "cuda/rows/elements.cuh"
#include "cuda/rows/routing/check_routing.h"
#include "moegemm/error.h"

namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr unsigned long long kNone = ~0ull;

struct Findings {
  unsigned long long bad_expert;  // the first one with a fault, or kNone
  std::int64_t bad_size;          // its m_sizes
  std::int64_t size_sum;          // the sum of m_sizes up to and with it, at most INT64_MAX
  unsigned long long bad_row;     // the first one with an index out of range, or kNone
};

/// One block: the first expert whose size is negative or makes the running sum exceed `rows`.
__global__ void __launch_bounds__(kThreads)
    check_sizes(const void* m_sizes, bool is_64_bit, std::int64_t experts, std::int64_t rows,
                Findings* findings) {
  __shared__ std::int64_t warp_sums[32];
  __shared__ unsigned long long first_bad;
  if (threadIdx.x == 0) {
    first_bad = kNone;
    findings->bad_expert = kNone;
    findings->bad_row = kNone;
  }
  __syncthreads();
  std::int64_t sum_before = 0;
  for (std::int64_t first = 0; first < experts; first += kThreads) {
    const std::int64_t e = first + threadIdx.x;
    const std::int64_t size = e < experts ? load_index(m_sizes, is_64_bit, e) : 0;
    // Cut a little above `rows`: sums cannot overflow, and whether they exceed `rows` stays known.
    const std::int64_t cut = size < 0 ? 0 : min(size, rows + 1);
    std::int64_t chunk_sum = 0;
    const std::int64_t up_to = sum_before + block_exclusive_sum(cut, warp_sums, chunk_sum);
    if (size < 0 || up_to + cut > rows) {
      atomicMin(&first_bad, static_cast<unsigned long long>(e));
    }
    __syncthreads();
    if (first_bad != kNone) {
      if (first_bad == static_cast<unsigned long long>(e)) {
        findings->bad_expert = first_bad;
        findings->bad_size = size;
        findings->size_sum = size > INT64_MAX - up_to ? INT64_MAX : up_to + size;
      }
      return;
    }
    sum_before += chunk_sum;
  }
}

/// The first row below sum(m_sizes) whose index does not name one of `rows` flat rows. Rows past
/// the sum are never looked up by any product.
__global__ void __launch_bounds__(kThreads)
    check_indices(const void* indices, bool is_64_bit, std::int64_t rows, Findings* findings) {
  if (findings->bad_expert != kNone) {
    return;
  }
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; r < rows;
       r += step) {
    const std::int64_t index = load_index(indices, is_64_bit, r);
    if (index < 0 || index >= rows) {
      atomicMin(&findings->bad_row, static_cast<unsigned long long>(r));
      return;  // later rows of this thread cannot be the first
    }
  }
}

/// A Findings in device memory for one check; freed in stream order.
class DeviceFindings {
 public:
  explicit DeviceFindings(cudaStream_t stream) : stream_(stream) {
    cuda::check(cudaMallocAsync(&data_, sizeof(Findings), stream),
                "allocate device memory for check");
  }
  ~DeviceFindings() { static_cast<void>(cudaFreeAsync(data_, stream_)); }
  DeviceFindings(const DeviceFindings&) = delete;
  DeviceFindings& operator=(const DeviceFindings&) = delete;
  Findings* get() const { return static_cast<Findings*>(data_); }

 private:
  cudaStream_t stream_;
  void* data_ = nullptr;
};

std::int64_t read_index(const TensorView& indices, std::int64_t i, cudaStream_t stream) {
  const bool is_64_bit = indices.dtype == DType::kInt64;
  std::int64_t wide = 0;
  std::int32_t narrow = 0;
  const auto bytes = static_cast<std::size_t>(size_bytes(indices.dtype));
  void* const target = is_64_bit ? static_cast<void*>(&wide) : static_cast<void*>(&narrow);
  check(cudaMemcpyAsync(target,
                        static_cast<const char*>(indices.data) + i * size_bytes(indices.dtype),
                        bytes, cudaMemcpyDeviceToHost, stream),
        "read an index for check");
  check(cudaStreamSynchronize(stream), "wait for check");
  return is_64_bit ? wide : narrow;
}

}  // namespace

std::optional<RoutingFault> check_routing(const RoutingView& routing, std::int64_t rows,
                                          cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &capture), "ask whether the CUDA stream is being captured");
  if (capture != cudaStreamCaptureStatusNone) {
    throw Error(ErrorKind::kRuntime,
                "check (or MOEGEMM_CHECK=1) waits for the device, which a CUDA stream cannot do "
                "while it is being captured: capture without it");
  }
  const TensorView& m_sizes = routing.m_sizes;
  const TensorView& indices = routing.gather_indices;
  const DeviceFindings on_device(stream);
  {
    const void* data = m_sizes.data;
    bool is_64_bit = m_sizes.dtype == DType::kInt64;
    std::int64_t experts = m_sizes.shape[0];
    Findings* findings = on_device.get();
    void* parameters[] = {&data, &is_64_bit, &experts, &rows, &findings};
    launch({reinterpret_cast<const void*>(&check_sizes), "check_sizes", dim3(1), dim3(kThreads)},
           parameters, stream);
  }
  if (indices.given() && indices.shape[0] > 0) {
    const void* data = indices.data;
    bool is_64_bit = indices.dtype == DType::kInt64;
    Findings* findings = on_device.get();
    void* parameters[] = {&data, &is_64_bit, &rows, &findings};
    const std::int64_t blocks = std::min<std::int64_t>((rows + kThreads - 1) / kThreads, 1024);
    launch({reinterpret_cast<const void*>(&check_indices), "check_indices",
            dim3(static_cast<unsigned>(std::max<std::int64_t>(blocks, 1))), dim3(kThreads)},
           parameters, stream);
  }
  Findings found;
  check(cudaMemcpyAsync(&found, on_device.get(), sizeof(found), cudaMemcpyDeviceToHost, stream),
        "read the result of check");
  check(cudaStreamSynchronize(stream), "wait for check");
  if (found.bad_expert != kNone) {
    const bool negative = found.bad_size < 0;
    return RoutingFault{
        negative ? RoutingFault::What::kNegativeSize : RoutingFault::What::kSizesExceedRows,
        static_cast<std::int64_t>(found.bad_expert), negative ? found.bad_size : found.size_sum};
  }
  if (found.bad_row != kNone) {
    const auto row = static_cast<std::int64_t>(found.bad_row);
    return RoutingFault{RoutingFault::What::kIndexOutOfRange, row,
                        read_index(indices, row, stream)};
  }
  return std::nullopt;
}

}  // namespace moegemm::cuda
