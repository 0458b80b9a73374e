#pragma once

#include <new>

#include "layer/tensors/device_memory.h"
#include "moegemm/error.h"
#include "moegemm/memory.h"

namespace moegemm::cli {

/// Lends one piece of memory to call after call: the program runs them in one order, so that each
/// is done with it when the next one starts.
class LentMemory final : public MemorySupport {
 public:
  explicit LentMemory(DeviceMemory& memory) : memory_(memory) {}

  void* allocate(std::int64_t bytes, Device) override {
    if (bytes <= bytes_) return buffer_.get();
    bytes_ = 0;
    buffer_.reset();
    try {
      buffer_ = memory_.allocate(bytes);
    } catch (const Error&) {
      return nullptr;
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
    bytes_ = bytes;
    return buffer_.get();
  }

 private:
  DeviceMemory& memory_;
  DeviceMemory::Buffer buffer_;
  std::int64_t bytes_ = 0;
};

}  // namespace moegemm::cli
