#include "core/tuning/stopwatch.h"

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
    std::memset(flush_, ++filling_, static_cast<std::size_t>(bytes_));
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

/// Once around the last-level cache; more than 32 MiB would take longer than what is timed.
std::int64_t cpu_flush_bytes() {
  constexpr std::int64_t kLeast = 8 << 20;
  constexpr std::int64_t kMost = 32 << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  return std::clamp<std::int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), kLeast, kMost);
#else
  return kLeast;
#endif
}

}  // namespace

double Stopwatch::now_seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::int64_t flush_bytes(Device device) {
#if MOEGEMM_HAS_CUDA
  if (device.type == DeviceType::kCuda) return cuda_flush_bytes(device);
#endif
  static_cast<void>(device);
  return cpu_flush_bytes();
}

std::unique_ptr<Stopwatch> make_stopwatch(Device device, const ExecutionContext& context,
                                          void* flush) {
#if MOEGEMM_HAS_CUDA
  if (device.type == DeviceType::kCuda) return make_cuda_stopwatch(device, context.stream, flush);
#endif
  static_cast<void>(device);
  static_cast<void>(context);
  return std::make_unique<CpuStopwatch>(flush, cpu_flush_bytes());
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
