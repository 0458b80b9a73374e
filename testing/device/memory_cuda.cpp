#include <cuda_runtime_api.h>

#include <stdexcept>

#include "testing/device/memory.h"

namespace moegemm::testing {
namespace {

void require(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

/// Everything is ordered on one stream of its own, not the default one: a kernel launched on the
/// wrong stream then shows as a wrong result.
class CudaMemory final : public Memory {
 public:
  CudaMemory() {
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~CudaMemory() override { cudaStreamDestroy(stream_); }
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  Device device() const override { return {DeviceType::kCuda, 0}; }
  void* allocate(std::size_t bytes) override {
    void* data = nullptr;
    require(cudaMalloc(&data, bytes), "cudaMalloc");
    return data;
  }
  void release(void* data) noexcept override { cudaFree(data); }
  void copy_in(void* to, const void* from, std::size_t bytes) override {
    require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "copy to the GPU");
    synchronize();
  }
  void copy_out(void* to, const void* from, std::size_t bytes) override {
    require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "copy from the GPU");
    synchronize();
  }
  void copy_within(void* to, const void* from, std::size_t bytes) override {
    require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_),
            "copy within the GPU");
  }
  void fill(void* to, std::uint8_t byte, std::size_t bytes) override {
    require(cudaMemsetAsync(to, byte, bytes, stream_), "cudaMemset");
  }
  void synchronize() override { require(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }
  std::int64_t available_bytes() override {
    std::size_t free = 0;
    std::size_t total = 0;
    require(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<std::int64_t>(free);
  }
  ExecutionContext context() override { return {.stream = stream_}; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace

Memory* cuda_memory(std::string* why_none) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    *why_none = status != cudaSuccess ? cudaGetErrorString(status) : "no CUDA device";
    cudaGetLastError();
    return nullptr;
  }
  // Never destroyed: at exit the driver may be gone before a static's destructor runs.
  static CudaMemory* memory = new CudaMemory;
  return memory;
}

std::unique_ptr<Memory> another_cuda_stream() { return std::make_unique<CudaMemory>(); }

}  // namespace moegemm::testing
