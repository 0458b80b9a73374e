#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "moegemm/tensor.h"

namespace moegemm::cli {

/// Memory and clock of the device a layer runs on. The library itself allocates nothing and takes
/// no time: its callers do, and this is the program's way of doing it on either device type.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  virtual Device device() const = 0;
  virtual std::int64_t available_bytes() const = 0;
  virtual void copy_in(void* destination, const void* host_source, std::int64_t bytes) = 0;
  virtual void copy_out(void* host_destination, const void* source, std::int64_t bytes) = 0;
  /// Sets every byte to 0xff: a NaN in each floating type, -1 in each integer type.
  virtual void poison(void* data, std::int64_t bytes) = 0;
  /// Milliseconds that the device spends on `work`.
  virtual double time_ms(const std::function<void()>& work) = 0;

  using Buffer = std::unique_ptr<void, std::function<void(void*)>>;
  /// Uninitialised memory, aligned for any kernel. The buffer must not outlive this object.
  virtual Buffer allocate(std::int64_t bytes) = 0;
};

/// Throws moegemm::Error when the device cannot be used.
std::unique_ptr<DeviceMemory> open_device(Device device);

}  // namespace moegemm::cli
