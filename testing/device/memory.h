#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moegemm/ops.h"
#include "moegemm/tensor.h"

namespace moegemm::testing {

/// Memory and clock of the device that tensors live on. The library itself allocates nothing and
/// takes no time: its callers do, and this is how tests, benchmarks and the program do it on the
/// CPU and on a GPU. A failed call throws moegemm::Error, or std::bad_alloc.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual Device device() const = 0;
  virtual void* allocate(std::size_t bytes) = 0;  ///< aligned to 64 bytes or more
  virtual void release(void* data) noexcept = 0;
  virtual void copy_in(void* to, const void* from, std::size_t bytes) = 0;
  virtual void copy_out(void* to, const void* from, std::size_t bytes) = 0;
  virtual void copy_within(void* to, const void* from, std::size_t bytes) = 0;
  virtual void fill(void* to, std::uint8_t byte, std::size_t bytes) = 0;
  /// Returns when every call made so far with context() has finished.
  virtual void synchronize() = 0;
  virtual std::int64_t available_bytes() = 0;
  virtual ExecutionContext context() = 0;
  /// That the device spends on `work`, which has to be launched with context().
  virtual double milliseconds(const std::function<void()>& work) = 0;
};

/// A device by its number, on its default stream; throws moegemm::Error when it cannot be used.
std::unique_ptr<Memory> open_memory(Device device);

Memory& cpu_memory();
/// The first CUDA device with a stream of its own: a kernel launched on the default one then shows
/// as a wrong result. nullptr when there is none, and then `why_none` says why.
Memory* cuda_memory(std::string* why_none);
/// What open_memory returns for a GPU; this and the next are defined in builds with CUDA.
std::unique_ptr<Memory> open_cuda_memory(Device device);
/// The same device with one more stream; there must be one.
std::unique_ptr<Memory> another_cuda_stream();

/// One allocation. `guarded` puts poisoned bytes around it that `guards_intact` looks at: outputs
/// have them. Inputs have none, so that address sanitizers see a read past the end.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Memory& memory, std::size_t bytes, bool guarded = false);
  /// Without bytes where the device has no memory for it.
  static Buffer if_possible(Memory& memory, std::size_t bytes);
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer();

  /// nullptr when it has no bytes, as a framework passes an empty tensor.
  void* data() const { return bytes_ == 0 ? nullptr : static_cast<char*>(base_) + guard_; }
  std::size_t bytes() const { return bytes_; }
  void upload(const void* from);
  void fill(std::uint8_t byte);
  std::vector<unsigned char> download() const;
  bool guards_intact() const;

 private:
  void swap(Buffer& other) noexcept;

  Memory* memory_ = nullptr;
  void* base_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t guard_ = 0;
};

/// Lends the same memory to one call after another; calls must not overlap. It is poisoned each
/// time unless the calls are timed.
class BorrowedMemory final : public MemorySupport {
 public:
  explicit BorrowedMemory(Memory& memory, bool poisoned = true)
      : memory_(memory), poisoned_(poisoned) {}
  void* allocate(std::int64_t bytes, Device) override;
  /// The memory's context with this in it.
  ExecutionContext context();

 private:
  Memory& memory_;
  bool poisoned_;
  Buffer lent_;
};

}  // namespace moegemm::testing
