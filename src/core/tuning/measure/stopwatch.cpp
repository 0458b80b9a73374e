#include "core/tuning/measure/stopwatch.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace moegemm {
namespace {

class CpuStopwatch final : public Stopwatch {
 public:
  CpuStopwatch(void* flush, std::int64_t bytes) : flush_(flush), bytes_(bytes) {}

  double time_us(const std::function<void()>& launch) override {
    if (flush_ != nullptr) std::memset(flush_, ++filling_, static_cast<std::size_t>(bytes_));
    const auto begin = std::chrono::steady_clock::now();
    launch();
    const auto end = std::chrono::steady_clock::now();
    return std::chrono::duration<double, std::micro>(end - begin).count();
  }

 private:
  void* flush_;
  std::int64_t bytes_;
  unsigned char filling_ = 0;
};

/// Twice the last-level cache, or of what one of many cores has of it. Overwriting goes once
/// around: more than 32 MiB would take longer than what is timed.
CacheSizes cpu_cache_sizes() {
  constexpr std::int64_t kLeast = 8 << 20;
  constexpr std::int64_t kMost = 32 << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const auto bytes = std::clamp<std::int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), kLeast, kMost);
#else
  const std::int64_t bytes = kLeast;
#endif
  return {2 * bytes, bytes};
}

}  // namespace

double Stopwatch::now_seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

CacheSizes cache_sizes(Device device) {
#if MOEGEMM_HAS_CUDA
  if (device.type == DeviceType::kCuda) return cuda_cache_sizes(device);
#endif
  static_cast<void>(device);
  return cpu_cache_sizes();
}

std::unique_ptr<Stopwatch> make_stopwatch(Device device, const ExecutionContext& context,
                                          void* flush) {
#if MOEGEMM_HAS_CUDA
  if (device.type == DeviceType::kCuda) return make_cuda_stopwatch(device, context.stream, flush);
#endif
  static_cast<void>(device);
  static_cast<void>(context);
  return std::make_unique<CpuStopwatch>(flush, cpu_cache_sizes().flush_bytes);
}

bool is_capturing(Device device, const ExecutionContext& context) {
#if MOEGEMM_HAS_CUDA
  if (device.type == DeviceType::kCuda) return is_cuda_stream_capturing(context.stream);
#endif
  static_cast<void>(device);
  static_cast<void>(context);
  return false;
}

}  // namespace moegemm
