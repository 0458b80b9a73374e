#include "cuda/backend/device_facts.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <vector>

#include "core/process/named_gpus.h"
#include "cuda/backend/error.h"
#include "moegemm/error.h"

namespace moegemm::cuda {
namespace {

std::string version_text(int version) {  // 13010 is 13.1
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// Why counting the devices failed, or found none.
std::string reason_for(cudaError_t status) {
  int driver = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  static_cast<void>(cudaGetLastError());
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (driver == 0) {
    return "no NVIDIA driver is installed";
  }
  if (status == cudaErrorInsufficientDriver) {
    return "the driver is for CUDA " + version_text(driver) + ", this library needs one for CUDA " +
           version_text(CUDART_VERSION / 1000 * 1000) + " or newer: update the driver";
  }
  if (status == cudaSuccess || status == cudaErrorNoDevice) {
    return visible ? "none is visible (CUDA_VISIBLE_DEVICES is \"" + std::string(visible) + "\")"
                   : "the driver sees none";
  }
  return describe(status);
}

struct Facts {
  std::vector<DeviceFacts> devices;
  std::string why_none;
};

double attribute(cudaDeviceAttr which, int ordinal) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, which, ordinal) == cudaSuccess ? value : 0;
}

Facts read_facts() {
  Facts facts;
  int count = 0;
  cudaError_t status = cudaGetDeviceCount(&count);
  for (int ordinal = 0; status == cudaSuccess && ordinal < count; ++ordinal) {
    cudaDeviceProp properties;
    status = cudaGetDeviceProperties(&properties, ordinal);
    if (status == cudaSuccess) {
      facts.devices.push_back({
          .ordinal = ordinal,
          .name = properties.name,
          .major = properties.major,
          .minor = properties.minor,
          .multiprocessors = properties.multiProcessorCount,
          .memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem),
          .shared_memory_bytes = static_cast<std::int64_t>(properties.sharedMemPerBlockOptin),
          .l2_bytes = static_cast<std::int64_t>(properties.l2CacheSize),
          .clock_hz = attribute(cudaDevAttrClockRate, ordinal) * 1e3,
          .bytes_per_second = attribute(cudaDevAttrMemoryClockRate, ordinal) * 1e3 * 2 *
                              attribute(cudaDevAttrGlobalMemoryBusWidth, ordinal) / 8,
          .multiprocessor_shared_memory_bytes =
              static_cast<std::int64_t>(properties.sharedMemPerMultiprocessor),
      });
    }
  }
  if (facts.devices.empty()) {
    facts.why_none = "no CUDA device: " + reason_for(status);
  }
  static_cast<void>(cudaGetLastError());
  return facts;
}

std::vector<DeviceFacts> facts_of_named_gpus() {
  std::vector<DeviceFacts> listed;
  for (const NamedGpu& gpu : named_gpus()) {
    listed.push_back({
        .ordinal = kFirstNamedGpu + static_cast<int>(listed.size()),
        .name = std::string(gpu.title),
        .major = gpu.major,
        .minor = gpu.minor,
        .multiprocessors = gpu.multiprocessors,
        .shared_memory_bytes = gpu.block_shared_bytes,
        .l2_bytes = gpu.l2_bytes,
        .clock_hz = gpu.clock_hz,
        .bytes_per_second = gpu.bytes_per_second,
        .multiprocessor_shared_memory_bytes = gpu.multiprocessor_shared_bytes,
    });
  }
  return listed;
}

const Facts& facts() {
  static const Facts cached = read_facts();
  return cached;
}

}  // namespace

int device_count() { return static_cast<int>(facts().devices.size()); }

const DeviceFacts* device_facts(int ordinal) {
  if (ordinal >= kFirstNamedGpu && named_gpu(ordinal) != nullptr) {
    static const std::vector<DeviceFacts> named = facts_of_named_gpus();
    return &named[static_cast<std::size_t>(ordinal - kFirstNamedGpu)];
  }
  const auto& devices = facts().devices;
  return ordinal >= 0 && ordinal < static_cast<int>(devices.size()) ? &devices[ordinal] : nullptr;
}

const std::string& why_no_device() { return facts().why_none; }

std::string find_device(Device device, const DeviceFacts*& facts) {
  if (device.type != DeviceType::kCuda) return "runs on CUDA devices only";
  facts = device_facts(device.index);
  if (facts) return {};
  return device_count() == 0 ? why_no_device()
                             : "no CUDA device with number " + std::to_string(device.index);
}

std::string capability_of(const DeviceFacts& facts) {
  return facts.name + " has compute capability " + std::to_string(facts.major) + "." +
         std::to_string(facts.minor);
}

DeviceGuard::DeviceGuard(int ordinal) {
  if (const NamedGpu* gpu = ordinal < kFirstNamedGpu ? nullptr : named_gpu(ordinal)) {
    throw Error(ErrorKind::kRuntime, "no CUDA device is called " + std::string(gpu->name) +
                                         ": problems are planned for it, nothing runs there");
  }
  if (!device_facts(ordinal)) {
    throw Error(ErrorKind::kRuntime, device_count() == 0
                                         ? why_no_device()
                                         : "no CUDA device " + std::to_string(ordinal) +
                                               ": there are " + std::to_string(device_count()));
  }
  int current = -1;
  check(cudaGetDevice(&current), "query the current CUDA device");
  if (current != ordinal) {
    check(cudaSetDevice(ordinal), "make the tensors' CUDA device current");
    previous_ = current;
  }
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) {
    static_cast<void>(cudaSetDevice(previous_));
  }
}

}  // namespace moegemm::cuda
