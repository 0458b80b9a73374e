#include "cuda/backend/launch/loading.h"

#include <cuda.h>

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/backend/device_facts.h"
#include "cuda/backend/error.h"
#include "cuda/backend/launch/capture_mode.h"

namespace moegemm::cuda {
namespace {

using FunctionOnDevice = std::pair<const void*, int>;

/// So that one function serves plans of any size, it may use all shared memory of a block.
cudaError_t load(const void* function, int device, cudaFunction_t& loaded) {
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
  if (const auto status = cudaFuncSetAttribute(
          function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(limit));
      status != cudaSuccess) {
    return status;
  }
  return cudaGetFuncBySymbol(&loaded, function);
}

struct List {
  ListedKernels::Functions functions;
  int least_major;
  int most_major;
};

std::vector<List>& lists() {
  static auto* all = new std::vector<List>;  // never destroyed: other threads may still read it
  return *all;
}

bool has_context(int device) {
  const auto get_state = reinterpret_cast<decltype(&cuDevicePrimaryCtxGetState)>(
      driver_entry("cuDevicePrimaryCtxGetState"));
  unsigned flags = 0;
  int active = 0;
  return get_state != nullptr && get_state(device, &flags, &active) == CUDA_SUCCESS && active != 0;
}

}  // namespace

void* driver_entry(const char* name) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const auto status =
      cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found);
  if (status == cudaSuccess && found == cudaDriverEntryPointSuccess) return address;
  static_cast<void>(cudaGetLastError());
  return nullptr;
}

cudaError_t ensure_loaded(const void* function, int device, cudaFunction_t& loaded) {
  // What this thread has seen loaded, direct mapped: a hit costs a few nanoseconds.
  struct Seen {
    FunctionOnDevice key;
    cudaFunction_t loaded;
  };
  thread_local std::array<Seen, 64> seen = {};
  const auto hash =
      (reinterpret_cast<std::uintptr_t>(function) >> 4) + static_cast<unsigned>(device);
  Seen& entry = seen[hash % seen.size()];
  const FunctionOnDevice wanted = {function, device};
  if (entry.key == wanted) [[likely]] {
    loaded = entry.loaded;
    return cudaSuccess;
  }
  // Never destroyed: other threads may still launch while the process exits.
  static auto* all = new std::map<FunctionOnDevice, cudaFunction_t>;
  static auto* mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  if (const auto found = all->find(wanted); found != all->end()) {
    loaded = found->second;
  } else {
    if (const auto status = load(function, device, loaded); status != cudaSuccess) {
      return status;
    }
    all->emplace(wanted, loaded);
  }
  entry = {wanted, loaded};
  return cudaSuccess;
}

ListedKernels::ListedKernels(Functions functions, int least_major, int most_major) {
  lists().push_back({functions, least_major, most_major});
}

int load_listed_kernels(int device) {
  const DeviceFacts* facts = device_facts(device);
  if (!facts || !has_context(device)) {
    return 0;
  }
  const DeviceGuard guard(device);
  int count = 0;
  for (const List& list : lists()) {
    if (facts->major < list.least_major || facts->major > list.most_major) continue;
    for (const void* function : list.functions()) {
      cudaFunction_t loaded = nullptr;
      check(ensure_loaded(function, device, loaded), "load a kernel");
      ++count;
    }
  }
  return count;
}

}  // namespace moegemm::cuda
