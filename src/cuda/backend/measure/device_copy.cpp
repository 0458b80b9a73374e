#include "core/tuning/measure/device_copy.h"

#include <cuda_runtime_api.h>

#include "cuda/backend/device_facts.h"
#include "cuda/backend/error.h"
#include "cuda/backend/launch/capture_mode.h"

namespace moegemm {
namespace {

void enqueue(Device device, cudaStream_t stream, void* to, const void* from, std::int64_t bytes,
             cudaMemcpyKind kind) {
  const cuda::DeviceGuard guard(device.index);
  cuda::check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), kind, stream),
              "copy operands of a measurement");
}

}  // namespace

void cuda_copy_on_device(Device device, void* stream, void* to, const void* from,
                         std::int64_t bytes) {
  enqueue(device, static_cast<cudaStream_t>(stream), to, from, bytes, cudaMemcpyDeviceToDevice);
}

void cuda_copy_to_host(Device device, void* stream, void* to, const void* from,
                       std::int64_t bytes) {
  const cuda::RelaxedCaptureMode relaxed;  // another thread may be capturing a graph
  const auto own = static_cast<cudaStream_t>(stream);
  enqueue(device, own, to, from, bytes, cudaMemcpyDeviceToHost);
  cuda::check(cudaStreamSynchronize(own), "read the operands of a measurement");
}

}  // namespace moegemm
