#include <cuda_runtime_api.h>

#include <string>

#include "moegemm/error.h"
#include "testing/device/memory.h"

namespace moegemm::testing {
namespace {

constexpr Device kFirst = {DeviceType::kCuda, 0};

void require(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw Error(ErrorKind::kRuntime, std::string(call) + " failed: " + cudaGetErrorString(status) +
                                       " (" + cudaGetErrorName(status) + ")");
}

/// Everything is ordered on one stream.
class CudaMemory final : public Memory {
 public:
  enum class Stream { kDefault, kOwn };
  CudaMemory(Device device, Stream stream) : device_(device) {
    require(cudaSetDevice(device.index), "cudaSetDevice");
    if (stream == Stream::kOwn) {
      require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    require(cudaEventCreate(&start_), "cudaEventCreate");
    require(cudaEventCreate(&stop_), "cudaEventCreate");
  }
  ~CudaMemory() override {
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  Device device() const override { return device_; }
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
  double milliseconds(const std::function<void()>& work) override {
    require(cudaEventRecord(start_, stream_), "cudaEventRecord");
    work();
    require(cudaEventRecord(stop_, stream_), "cudaEventRecord");
    require(cudaEventSynchronize(stop_), "the timed work");
    float elapsed = 0;
    require(cudaEventElapsedTime(&elapsed, start_, stop_), "cudaEventElapsedTime");
    return elapsed;
  }

 private:
  Device device_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t start_ = nullptr;
  cudaEvent_t stop_ = nullptr;
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
  static CudaMemory* memory = new CudaMemory(kFirst, CudaMemory::Stream::kOwn);
  return memory;
}

std::unique_ptr<Memory> another_cuda_stream() {
  return std::make_unique<CudaMemory>(kFirst, CudaMemory::Stream::kOwn);
}

std::unique_ptr<Memory> open_cuda_memory(Device device) {
  return std::make_unique<CudaMemory>(device, CudaMemory::Stream::kDefault);
}

}  // namespace moegemm::testing
