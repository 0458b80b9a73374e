#pragma once

#include <new>

#include "moegemm/error.h"
#include "moegemm/memory.h"
#include "testing/device/memory.h"

namespace moegemm::cli {

/// Lends one piece of memory to call after call: the program runs them in one order, so that each
/// is done with it when the next one starts.
class LentMemory final : public MemorySupport {
 public:
  explicit LentMemory(testing::Memory& memory) : memory_(memory) {}

  void* allocate(std::int64_t bytes, Device) override {
    const auto size = static_cast<std::size_t>(bytes);
    if (size <= buffer_.bytes()) return buffer_.data();
    buffer_ = {};  // before the larger one is taken
    try {
      buffer_ = testing::Buffer(memory_, size);
    } catch (const Error&) {
      return nullptr;
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
    return buffer_.data();
  }

 private:
  testing::Memory& memory_;
  testing::Buffer buffer_;
};

}  // namespace moegemm::cli
