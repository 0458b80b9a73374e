#include "cuda/host/launch.h"

#include <array>
#include <cstdint>
#include <mutex>
#include <set>
#include <utility>

#include "cuda/host/capture_mode.h"
#include "cuda/host/device_facts.h"
#include "cuda/host/error.h"
#include "moegemm/error.h"

namespace moegemm::cuda {
namespace {

using FunctionOnDevice = std::pair<const void*, int>;

/// Loads the function on the current device and lets it use all shared memory that a block can get,
/// so that one function serves plans of any size.
cudaError_t load(const void* function, int device) {
  const RelaxedCaptureMode relaxed;
  cudaFuncAttributes attributes;
  if (const auto status = cudaFuncGetAttributes(&attributes, function); status != cudaSuccess) {
    return status;
  }
  const DeviceFacts* facts = device_facts(device);
  if (!facts) {
    return cudaErrorInvalidDevice;
  }
  const auto limit =
      facts->shared_memory_bytes - static_cast<std::int64_t>(attributes.sharedSizeBytes);
  return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(limit));
}

/// Runs load() once for each function and device, whichever threads ask.
cudaError_t ensure_loaded(const void* function, int device) {
  // What this thread has seen loaded, direct mapped: a hit costs a few nanoseconds.
  thread_local std::array<FunctionOnDevice, 64> seen = {};
  const auto hash =
      (reinterpret_cast<std::uintptr_t>(function) >> 4) + static_cast<unsigned>(device);
  FunctionOnDevice& entry = seen[hash % seen.size()];
  const FunctionOnDevice wanted = {function, device};
  if (entry == wanted) [[likely]] {
    return cudaSuccess;
  }
  // Never destroyed: other threads may still launch while the process exits.
  static auto* loaded = new std::set<FunctionOnDevice>;
  static auto* mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  if (!loaded->contains(wanted)) {
    if (const auto status = load(function, device); status != cudaSuccess) {
      return status;
    }
    loaded->insert(wanted);
  }
  entry = wanted;
  return cudaSuccess;
}

cudaError_t try_launch(const LaunchSpec& spec, void** args, cudaStream_t stream) {
  int device = 0;
  if (const auto status = cudaGetDevice(&device); status != cudaSuccess) {
    return status;
  }
  if (const auto status = ensure_loaded(spec.function, device); status != cudaSuccess) {
    return status;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = spec.grid;
  config.blockDim = spec.block;
  config.dynamicSmemBytes = static_cast<std::size_t>(spec.dynamic_smem_bytes);
  config.stream = stream;
  return cudaLaunchKernelExC(&config, spec.function, args);
}

std::string to_string(const dim3& extent) {
  return std::to_string(extent.x) + "x" + std::to_string(extent.y) + "x" + std::to_string(extent.z);
}

[[noreturn]] void throw_failure(const LaunchSpec& spec, cudaError_t status, const Plan* plan) {
  static_cast<void>(cudaGetLastError());
  throw Error(ErrorKind::kRuntime,
              "could not launch CUDA kernel " + std::string(spec.name) + " (grid " +
                  to_string(spec.grid) + ", block " + to_string(spec.block) + ", " +
                  std::to_string(spec.dynamic_smem_bytes) + " bytes of dynamic shared memory" +
                  (plan ? ", plan " + moegemm::to_string(*plan) : std::string()) +
                  "): " + describe(status));
}

}  // namespace

void launch(const LaunchSpec& spec, void** args, cudaStream_t stream, const Plan& plan) {
  if (const auto status = try_launch(spec, args, stream); status != cudaSuccess) {
    throw_failure(spec, status, &plan);
  }
}

void launch(const LaunchSpec& spec, void** args, cudaStream_t stream) {
  if (const auto status = try_launch(spec, args, stream); status != cudaSuccess) {
    throw_failure(spec, status, nullptr);
  }
}

}  // namespace moegemm::cuda
