#include "core/tuning/measure/stopwatch.h"

#include <cuda_runtime_api.h>

#include "cuda/backend/device_facts.h"
#include "cuda/backend/error.h"
#include "cuda/backend/launch/capture_mode.h"
#include "cuda/backend/measure/spin.h"

namespace moegemm {
namespace {

using cuda::check;

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "create an event"); }
  ~Event() { static_cast<void>(cudaEventDestroy(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Events around each launch. Spinning or overwriting the flush buffer keeps the GPU busy for tens
/// of microseconds, in which the host enqueues the launch: its own time is not measured.
class CudaStopwatch final : public Stopwatch {
 public:
  CudaStopwatch(Device device, cudaStream_t stream, void* flush)
      : guard_(device.index),
        stream_(stream),
        flush_(flush),
        bytes_(cuda_cache_sizes(device).flush_bytes) {}

  double time_us(const std::function<void()>& launch) override {
    if (flush_ == nullptr) {
      cuda::spin(kSpinMicroseconds, stream_);
    } else {
      check(cudaMemsetAsync(flush_, ++filling_, static_cast<std::size_t>(bytes_), stream_),
            "flush the L2 cache");
    }
    check(cudaEventRecord(begin_.get(), stream_), "record an event");
    launch();
    check(cudaEventRecord(end_.get(), stream_), "record an event");
    check(cudaEventSynchronize(end_.get()), "run the timed kernel");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_.get(), end_.get()), "read the events");
    return ms * 1e3;
  }

 private:
  static constexpr int kSpinMicroseconds = 40;

  cuda::DeviceGuard guard_;
  cuda::RelaxedCaptureMode relaxed_;  // another thread may be capturing a graph
  cudaStream_t stream_;
  void* flush_;
  std::int64_t bytes_;
  unsigned char filling_ = 0;
  Event begin_;
  Event end_;
};

}  // namespace

CacheSizes cuda_cache_sizes(Device device) {
  const cuda::DeviceFacts* facts = cuda::device_facts(device.index);
  if (facts == nullptr) return {};
  // Twice around: lines are not evicted in the order they came.
  return {2 * facts->l2_bytes, 2 * facts->l2_bytes};
}

std::unique_ptr<Stopwatch> make_cuda_stopwatch(Device device, void* stream, void* flush) {
  return std::make_unique<CudaStopwatch>(device, static_cast<cudaStream_t>(stream), flush);
}

bool is_cuda_stream_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  // The legacy stream cannot be asked while another one captures: that is an answer too.
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return error != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

}  // namespace moegemm
