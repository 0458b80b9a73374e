#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "core/tuning/measure/cache_sizes.h"
#include "moegemm/ops.h"
#include "moegemm/tensor.h"

namespace moegemm {

/// Times single launches. Real ones are below; tests bring their own.
class Stopwatch {
 public:
  virtual ~Stopwatch() = default;

  /// Microseconds that the device spends on what `launch` starts.
  virtual double time_us(const std::function<void()>& launch) = 0;

  /// Seconds since some fixed moment.
  virtual double now_seconds() const;
};

CacheSizes cache_sizes(Device device);

/// A stopwatch for launches on `context`. It overwrites `flush`, CacheSizes::flush_bytes of device
/// memory, before each launch; null: the launches themselves see to cold caches.
std::unique_ptr<Stopwatch> make_stopwatch(Device device, const ExecutionContext& context,
                                          void* flush);

/// Whether launches on `context` are being recorded into a graph instead of run.
bool is_capturing(Device device, const ExecutionContext& context);

// Defined in builds with CUDA.
CacheSizes cuda_cache_sizes(Device device);
std::unique_ptr<Stopwatch> make_cuda_stopwatch(Device device, void* stream, void* flush);
bool is_cuda_stream_capturing(void* stream);

}  // namespace moegemm
