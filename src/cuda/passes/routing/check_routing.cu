#include <algorithm>
#include <cstddef>
#include <vector>

#include "cuda/backend/error.h"
#include "cuda/backend/launch/capture_mode.h"
#include "cuda/backend/launch/launch.h"
#include "cuda/passes/block_sums.cuh"
#include "cuda/passes/elements.cuh"
#include "cuda/passes/passes.h"
#include "moegemm/error.h"

namespace moegemm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr unsigned long long kNone = ~0ull;

struct Findings {
  unsigned long long bad_expert;    // the first one with a fault, or kNone
  std::int64_t bad_size;            // its m_sizes
  std::int64_t size_sum;            // the sum of m_sizes up to and with it, at most INT64_MAX
  std::int64_t routed;              // the sum of all sizes, if none has a fault
  unsigned long long bad_row;       // the first one with an index out of range, or kNone
  unsigned long long repeated_row;  // the first one whose index an earlier one has, or kNone
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
    findings->repeated_row = kNone;
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
  if (threadIdx.x == 0) findings->routed = sum_before;
}

/// Calls `look(row, index)` for this thread's rows below sum(m_sizes) until it returns false. The
/// indices of rows past the sum are never read by any product.
template <typename Look>
__device__ void for_each_index(const void* indices, bool is_64_bit, const Findings* findings,
                               const Look& look) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       r < findings->routed; r += step) {
    if (!look(static_cast<unsigned long long>(r), load_index(indices, is_64_bit, r))) return;
  }
}

/// The first row whose index does not name one of `flat_rows` flat rows, and for each flat row the
/// first that names it.
__global__ void __launch_bounds__(kThreads)
    check_range(const void* indices, bool is_64_bit, std::int64_t flat_rows, Findings* findings,
                unsigned long long* first_at) {
  for_each_index(indices, is_64_bit, findings, [&](unsigned long long row, std::int64_t index) {
    const bool good = index >= 0 && index < flat_rows;
    atomicMin(good ? &first_at[index] : &findings->bad_row, row);
    return good;  // later rows of this thread cannot be the first bad one
  });
}

/// The first row whose index an earlier one has too.
__global__ void __launch_bounds__(kThreads)
    check_repeats(const void* indices, bool is_64_bit, std::int64_t flat_rows, Findings* findings,
                  unsigned long long* first_at) {
  for_each_index(indices, is_64_bit, findings, [&](unsigned long long row, std::int64_t index) {
    if (index < 0 || index >= flat_rows || first_at[index] >= row) return true;
    atomicMin(&findings->repeated_row, row);
    return false;
  });
}

/// Device memory for one check; freed in stream order.
template <typename T>
class CheckMemory {
 public:
  CheckMemory(std::int64_t count, cudaStream_t stream) : stream_(stream) {
    cuda::check(cudaMallocAsync(&data_, static_cast<std::size_t>(count) * sizeof(T), stream),
                "allocate device memory for check");
  }
  ~CheckMemory() { static_cast<void>(cudaFreeAsync(data_, stream_)); }
  CheckMemory(const CheckMemory&) = delete;
  CheckMemory& operator=(const CheckMemory&) = delete;
  T* get() const { return static_cast<T*>(data_); }

 private:
  cudaStream_t stream_;
  void* data_ = nullptr;
};

template <typename T>
T read_back(const T* data, cudaStream_t stream) {
  T value;
  check(cudaMemcpyAsync(&value, data, sizeof(value), cudaMemcpyDeviceToHost, stream),
        "read the result of check");
  check(cudaStreamSynchronize(stream), "wait for check");
  return value;
}

std::int64_t read_index(const TensorView& indices, std::int64_t i, cudaStream_t stream) {
  if (indices.dtype == DType::kInt64) {
    return read_back(static_cast<const std::int64_t*>(indices.data) + i, stream);
  }
  return read_back(static_cast<const std::int32_t*>(indices.data) + i, stream);
}

/// A vector in host memory, where it is given.
class HostCopy {
 public:
  HostCopy(const TensorView& vector, cudaStream_t stream) : view_(vector) {
    if (!vector.given()) return;
    data_.resize(static_cast<std::size_t>(vector.numel() * size_bytes(vector.dtype)));
    view_.data = data_.data();
    if (data_.empty()) return;
    cuda::check(
        cudaMemcpyAsync(data_.data(), vector.data, data_.size(), cudaMemcpyDeviceToHost, stream),
        "read the routing for check");
    cuda::check(cudaStreamSynchronize(stream), "wait for check");
  }
  const TensorView& view() const { return view_; }

 private:
  std::vector<std::byte> data_;
  TensorView view_;
};

void refuse_while_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &capture), "ask whether the CUDA stream is being captured");
  if (capture != cudaStreamCaptureStatusNone) {
    throw Error(ErrorKind::kRuntime,
                "check (or MOEGEMM_CHECK=1) waits for the device, which a CUDA stream cannot do "
                "while it is being captured: capture without it");
  }
}

std::optional<RoutingFault> find_bad_index(const TensorView& indices, std::int64_t rows,
                                           std::int64_t flat_rows, Findings* findings,
                                           cudaStream_t stream) {
  const CheckMemory<unsigned long long> first_at(std::max<std::int64_t>(flat_rows, 1), stream);
  check(cudaMemsetAsync(first_at.get(), 0xff, static_cast<std::size_t>(flat_rows) * 8, stream),
        "prepare check");
  const void* data = indices.data;
  bool is_64_bit = indices.dtype == DType::kInt64;
  unsigned long long* first = first_at.get();
  void* parameters[] = {&data, &is_64_bit, &flat_rows, &findings, &first};
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>((rows + kThreads - 1) / kThreads, 1024));
  launch({reinterpret_cast<const void*>(&check_range), "check_range", dim3(blocks), dim3(kThreads)},
         parameters, stream);
  launch({reinterpret_cast<const void*>(&check_repeats), "check_repeats", dim3(blocks),
          dim3(kThreads)},
         parameters, stream);
  const Findings found = read_back(findings, stream);
  const auto row = static_cast<std::int64_t>(std::min(found.bad_row, found.repeated_row));
  if (found.bad_row == found.repeated_row) return std::nullopt;  // none of either
  const std::int64_t index = read_index(indices, row, stream);
  if (found.bad_row < found.repeated_row) {
    return RoutingFault{RoutingFault::What::kIndexOutOfRange, row, index};
  }
  return RoutingFault{RoutingFault::What::kDuplicateIndex, row, index,
                      static_cast<std::int64_t>(read_back(first + index, stream))};
}

}  // namespace

std::optional<RoutingFault> CudaPasses::check(const RoutingView& routing, std::int64_t rows,
                                              std::int64_t flat_rows,
                                              const ExecutionContext& context) const {
  const PassLaunch on(routing.m_sizes.device, context);
  refuse_while_capturing(on.stream);
  const RelaxedCaptureMode relaxed;  // another thread may be capturing a graph
  if (routing.segments() != Segments::kPacked) {
    const HostCopy sizes(routing.m_sizes, on.stream), starts(routing.starts, on.stream);
    const HostCopy indices(routing.gather_indices, on.stream);
    RoutingView on_host = routing;
    on_host.m_sizes = sizes.view();
    on_host.starts = starts.view();
    on_host.gather_indices = indices.view();
    return find_routing_fault(on_host, rows, flat_rows);
  }
  const TensorView& m_sizes = routing.m_sizes;
  const TensorView& indices = routing.gather_indices;
  const CheckMemory<Findings> on_device(1, on.stream);
  {
    const void* data = m_sizes.data;
    bool is_64_bit = m_sizes.dtype == DType::kInt64;
    std::int64_t experts = m_sizes.shape[0];
    Findings* findings = on_device.get();
    void* parameters[] = {&data, &is_64_bit, &experts, &rows, &findings};
    launch({reinterpret_cast<const void*>(&check_sizes), "check_sizes", dim3(1), dim3(kThreads)},
           parameters, on.stream);
  }
  const Findings found = read_back(on_device.get(), on.stream);
  if (found.bad_expert != kNone) {
    const bool negative = found.bad_size < 0;
    return RoutingFault{
        negative ? RoutingFault::What::kNegativeSize : RoutingFault::What::kSizesExceedRows,
        static_cast<std::int64_t>(found.bad_expert), negative ? found.bad_size : found.size_sum};
  }
  if (!indices.given() || rows == 0) return std::nullopt;
  return find_bad_index(indices, rows, flat_rows, on_device.get(), on.stream);
}

std::optional<DroppedRow> CudaPasses::dropped_row(const TensorView& expert_ids,
                                                  std::int64_t experts,
                                                  const TensorView& num_tokens,
                                                  std::int64_t capacity,
                                                  const ExecutionContext& context) const {
  const PassLaunch on(expert_ids.device, context);
  refuse_while_capturing(on.stream);
  const RelaxedCaptureMode relaxed;  // another thread may be capturing a graph
  const std::int64_t all = expert_ids.shape[0], topk = expert_ids.shape[1];
  const std::int64_t tokens =
      num_tokens.given() ? std::clamp<std::int64_t>(read_index(num_tokens, 0, on.stream), 0, all)
                         : all;
  const auto element = static_cast<std::size_t>(size_bytes(expert_ids.dtype));
  const std::size_t row_bytes = static_cast<std::size_t>(topk) * element;
  std::vector<std::byte> ids(static_cast<std::size_t>(tokens) * row_bytes);
  if (!ids.empty()) {
    cuda::check(
        cudaMemcpy2DAsync(ids.data(), row_bytes, expert_ids.data,
                          static_cast<std::size_t>(expert_ids.row_stride) * element, row_bytes,
                          static_cast<std::size_t>(tokens), cudaMemcpyDeviceToHost, on.stream),
        "read the expert ids for check");
    cuda::check(cudaStreamSynchronize(on.stream), "wait for check");
  }
  TensorView on_host = expert_ids;
  on_host.data = ids.data();
  on_host.row_stride = topk;
  return find_dropped_row(on_host, experts, tokens, capacity);
}

}  // namespace moegemm::cuda
