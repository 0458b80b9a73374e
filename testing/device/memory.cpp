#include "testing/device/memory.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <new>
#include <utility>

#include "moegemm/error.h"
#include "testing/numerics/floats.h"

namespace moegemm::testing {
namespace {

constexpr std::size_t kGuardBytes = 256;  // keeps the alignment of every allocator here
constexpr std::align_val_t kAlignment{64};

class CpuMemory final : public Memory {
 public:
  Device device() const override { return {}; }
  void* allocate(std::size_t bytes) override { return ::operator new(bytes, kAlignment); }
  void release(void* data) noexcept override { ::operator delete(data, kAlignment); }
  void copy_in(void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void copy_out(void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void copy_within(void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void fill(void* to, std::uint8_t byte, std::size_t bytes) override {
    std::memset(to, byte, bytes);
  }
  void synchronize() override {}
  std::int64_t available_bytes() override {
    std::ifstream meminfo("/proc/meminfo");
    std::string key;
    for (std::int64_t kib = 0; meminfo >> key; meminfo.ignore(256, '\n')) {
      if (key == "MemAvailable:" && meminfo >> kib) return kib * 1024;
    }
    return INT64_MAX;  // unknown: let the allocation decide
  }
  ExecutionContext context() override { return {}; }
  double milliseconds(const std::function<void()>& work) override {
    const auto start = std::chrono::steady_clock::now();
    work();
    const auto stop = std::chrono::steady_clock::now();
    return std::chrono::duration<double, std::milli>(stop - start).count();
  }
};

}  // namespace

Memory& cpu_memory() {
  static CpuMemory memory;
  return memory;
}

std::unique_ptr<Memory> open_memory(Device device) {
  if (device.type == DeviceType::kCpu) return std::make_unique<CpuMemory>();
#if MOEGEMM_HAS_CUDA
  return open_cuda_memory(device);
#else
  throw Error(ErrorKind::kNotImplemented, "device cuda: this build has no CUDA support");
#endif
}

#if !MOEGEMM_HAS_CUDA
Memory* cuda_memory(std::string* why_none) {
  *why_none = "built without CUDA";
  return nullptr;
}
#endif

Buffer::Buffer(Memory& memory, std::size_t bytes, bool guarded)
    : memory_(&memory), bytes_(bytes), guard_(guarded ? kGuardBytes : 0) {
  if (bytes == 0 && !guarded) return;
  base_ = memory.allocate(bytes + 2 * guard_);
  if (guarded) memory.fill(base_, kPoisonByte, bytes + 2 * guard_);
}

Buffer Buffer::if_possible(Memory& memory, std::size_t bytes) {
  try {
    return {memory, bytes};
  } catch (const Error&) {
    return {};
  } catch (const std::bad_alloc&) {
    return {};
  }
}

Buffer::~Buffer() {
  if (base_ != nullptr) memory_->release(base_);
}

void Buffer::swap(Buffer& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  std::swap(guard_, other.guard_);
}

void Buffer::upload(const void* from) {
  if (bytes_ != 0) memory_->copy_in(data(), from, bytes_);
}

void Buffer::fill(std::uint8_t byte) {
  if (bytes_ != 0) memory_->fill(data(), byte, bytes_);
}

std::vector<unsigned char> Buffer::download() const {
  std::vector<unsigned char> bytes(bytes_);
  if (bytes_ != 0) memory_->copy_out(bytes.data(), data(), bytes_);
  return bytes;
}

bool Buffer::guards_intact() const {
  if (guard_ == 0) return true;
  std::vector<unsigned char> bytes(2 * guard_);
  memory_->copy_out(bytes.data(), base_, guard_);
  memory_->copy_out(bytes.data() + guard_, static_cast<char*>(base_) + guard_ + bytes_, guard_);
  return std::ranges::all_of(bytes, [](unsigned char b) { return b == kPoisonByte; });
}

void* BorrowedMemory::allocate(std::int64_t bytes, Device) {
  const auto size = static_cast<std::size_t>(bytes);
  if (lent_.bytes() < size) {
    lent_ = {};  // before the larger one is taken
    lent_ = Buffer::if_possible(memory_, size);
  }
  if (poisoned_ && lent_.data() != nullptr) memory_.fill(lent_.data(), kPoisonByte, size);
  return lent_.data();
}

ExecutionContext BorrowedMemory::context() {
  ExecutionContext context = memory_.context();
  context.memory = this;
  return context;
}

}  // namespace moegemm::testing
