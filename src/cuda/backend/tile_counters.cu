#include <array>
#include <atomic>
#include <mutex>
#include <optional>

#include "cuda/backend/device_facts.h"
#include "cuda/backend/error.h"
#include "cuda/backend/launch/capture_mode.h"
#include "cuda/backend/tile_counters.h"
#include "cuda/backend/tile_slots.h"

namespace moegemm::cuda {
namespace {

__device__ TileCounter counters[TileSlots::kSlots];  // 2 MiB on each device in use, zero at load

constexpr int kMaxDevices = 64;  // per process; devices beyond get no counter

struct DeviceCounters {
  std::atomic<TileCounter*> base = nullptr;
  TileSlots slots;
};

/// Never destroyed: other threads may still launch while the process exits.
std::array<DeviceCounters, kMaxDevices>& all_devices() {
  static auto* devices = new std::array<DeviceCounters, kMaxDevices>;
  return *devices;
}

/// Address of the array on `device`; loads the module there at the first call.
TileCounter* base_on(int device, DeviceCounters& of_device) {
  if (TileCounter* known = of_device.base.load(std::memory_order_acquire)) {
    return known;
  }
  const DeviceGuard guard(device);
  const RelaxedCaptureMode relaxed;
  void* address = nullptr;
  check(cudaGetSymbolAddress(&address, counters), "find the tile counters on the CUDA device");
  of_device.base.store(static_cast<TileCounter*>(address), std::memory_order_release);
  return static_cast<TileCounter*>(address);
}

}  // namespace

TileCounter* acquire_tile_counter(int device, cudaStream_t stream) {
  if (device < 0 || device >= kMaxDevices) {
    return nullptr;
  }
  DeviceCounters& of_device = all_devices()[device];
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &capture), "ask whether the CUDA stream is being captured");
  if (capture != cudaStreamCaptureStatusNone) {
    const std::optional<int> slot = of_device.slots.for_captured_launch();
    return slot ? base_on(device, of_device) + *slot : nullptr;
  }

  unsigned long long stream_id = 0;
  check(cudaStreamGetId(stream, &stream_id), "query the id of the CUDA stream");
  struct LastUse {
    int device = -1;
    unsigned long long stream_id = 0;
    TileCounter* counter = nullptr;
  };
  thread_local LastUse last;  // a thread mostly stays on one stream: no lock, no hash
  if (last.device != device || last.stream_id != stream_id) {
    const std::optional<int> slot = of_device.slots.for_stream(stream_id);
    last = {device, stream_id, slot ? base_on(device, of_device) + *slot : nullptr};
  }
  return last.counter;
}

}  // namespace moegemm::cuda
