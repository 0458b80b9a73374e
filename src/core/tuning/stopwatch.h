#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "moegemm/ops.h"
#include "moegemm/tensor.h"

namespace moegemm {

/// Times single launches. Real ones are below; tests bring their own.
class Stopwatch {
 public:
  virtual ~Stopwatch() = default;

  /// Microseconds that the device spends on what `launch` starts, with cold caches: in a model the
  /// other layers have been there in between.
  virtual double time_us(const std::function<void()>& launch) = 0;

  /// Seconds since some fixed moment.
  virtual double now_seconds() const;
};

/// Bytes that a stopwatch overwrites before each launch so that nothing of the last one is cached.
/// The operands are the caller's own, so there is no second set of them to rotate through.
std::int64_t flush_bytes(Device device);

/// A stopwatch for launches on `context`. `flush` points to flush_bytes() of device memory.
std::unique_ptr<Stopwatch> make_stopwatch(Device device, const ExecutionContext& context,
                                          void* flush);

/// Whether launches on `context` are being recorded into a graph instead of run.
bool is_capturing(Device device, const ExecutionContext& context);

#if MOEGEMM_HAS_CUDA
std::int64_t cuda_flush_bytes(Device device);
std::unique_ptr<Stopwatch> make_cuda_stopwatch(Device device, void* stream, void* flush);
bool is_cuda_stream_capturing(void* stream);
#endif

}  // namespace moegemm
