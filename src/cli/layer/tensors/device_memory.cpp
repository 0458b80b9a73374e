#include "layer/tensors/device_memory.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <string>

#include "moegemm/error.h"

#if MOEGEMM_HAS_CUDA
#include <cuda_runtime.h>
#endif

namespace moegemm::cli {
namespace {

constexpr int kPoisonByte = 0xff;

class CpuMemory final : public DeviceMemory {
 public:
  Device device() const override { return {}; }

  std::int64_t available_bytes() const override {
    std::ifstream meminfo("/proc/meminfo");
    std::string key;
    std::int64_t kib = 0;
    std::string rest;
    while (meminfo >> key >> kib && std::getline(meminfo, rest)) {
      if (key == "MemAvailable:") return kib * 1024;
    }
    return INT64_MAX;  // unknown: let the allocation decide
  }

  void copy_in(void* destination, const void* host_source, std::int64_t bytes) override {
    std::memcpy(destination, host_source, static_cast<std::size_t>(bytes));
  }

  void copy_out(void* host_destination, const void* source, std::int64_t bytes) override {
    std::memcpy(host_destination, source, static_cast<std::size_t>(bytes));
  }

  void poison(void* data, std::int64_t bytes) override {
    std::memset(data, kPoisonByte, static_cast<std::size_t>(bytes));
  }

  double time_ms(const std::function<void()>& work) override {
    const auto start = std::chrono::steady_clock::now();
    work();
    const auto stop = std::chrono::steady_clock::now();
    return std::chrono::duration<double, std::milli>(stop - start).count();
  }

  Buffer allocate(std::int64_t bytes) override {
    constexpr std::align_val_t kAlignment{64};  // one cache line, the widest vector
    void* data = ::operator new(static_cast<std::size_t>(bytes), kAlignment);
    return {data, [](void* p) { ::operator delete(p, kAlignment); }};
  }
};

#if MOEGEMM_HAS_CUDA
void require(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(ErrorKind::kRuntime,
              fmt::format("{} failed: {} ({})", what, cudaGetErrorString(status),
                          cudaGetErrorName(status)));
}

class CudaMemory final : public DeviceMemory {
 public:
  explicit CudaMemory(Device device) : device_(device) {
    require(cudaSetDevice(device.index), "cudaSetDevice");
    require(cudaEventCreate(&start_), "cudaEventCreate");
    require(cudaEventCreate(&stop_), "cudaEventCreate");
  }
  ~CudaMemory() override {
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
  }
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  Device device() const override { return device_; }

  std::int64_t available_bytes() const override {
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    require(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    return static_cast<std::int64_t>(free_bytes);
  }

  void copy_in(void* destination, const void* host_source, std::int64_t bytes) override {
    require(cudaMemcpy(destination, host_source, static_cast<std::size_t>(bytes),
                       cudaMemcpyHostToDevice),
            "copy to the device");
  }

  void copy_out(void* host_destination, const void* source, std::int64_t bytes) override {
    require(cudaMemcpy(host_destination, source, static_cast<std::size_t>(bytes),
                       cudaMemcpyDeviceToHost),
            "copy from the device");
  }

  void poison(void* data, std::int64_t bytes) override {
    require(cudaMemset(data, kPoisonByte, static_cast<std::size_t>(bytes)), "cudaMemset");
  }

  double time_ms(const std::function<void()>& work) override {
    require(cudaEventRecord(start_), "cudaEventRecord");
    work();
    require(cudaEventRecord(stop_), "cudaEventRecord");
    require(cudaEventSynchronize(stop_), "the timed work");
    float ms = 0;
    require(cudaEventElapsedTime(&ms, start_, stop_), "cudaEventElapsedTime");
    return ms;
  }

  Buffer allocate(std::int64_t bytes) override {
    void* data = nullptr;
    // A zero-byte allocation gives a null pointer, which a view of an empty tensor may carry.
    require(cudaMalloc(&data, static_cast<std::size_t>(bytes)), "cudaMalloc");
    return {data, [](void* p) { cudaFree(p); }};
  }

 private:
  Device device_;
  cudaEvent_t start_ = nullptr;
  cudaEvent_t stop_ = nullptr;
};
#endif

}  // namespace

std::unique_ptr<DeviceMemory> open_device(Device device) {
  if (device.type == DeviceType::kCpu) return std::make_unique<CpuMemory>();
#if MOEGEMM_HAS_CUDA
  return std::make_unique<CudaMemory>(device);
#else
  throw Error(ErrorKind::kNotImplemented, "device cuda: this build has no CUDA support");
#endif
}

}  // namespace moegemm::cli
