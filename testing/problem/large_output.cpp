#include "testing/problem/large_output.h"

#include <algorithm>

#include "testing/numerics/floats.h"

namespace moegemm::testing {
namespace {

constexpr std::size_t kGuardBytes = RepeatedMemory::kPageBytes;
constexpr std::size_t kSharedBytes = std::size_t{4} << 20;  // stays in a cache

bool is_poisoned(const char* begin, std::size_t bytes) {
  return std::all_of(begin, begin + bytes,
                     [](char byte) { return static_cast<unsigned char>(byte) == kPoisonByte; });
}

}  // namespace

LargeOutput::LargeOutput(Memory& memory, std::int64_t rows, std::int64_t row_bytes,
                         const std::vector<std::int64_t>& looked_at)
    : memory_(memory), rows_(rows), row_bytes_(row_bytes) {
  const std::size_t bytes = static_cast<std::size_t>(rows * row_bytes);
  if (memory.device().type == DeviceType::kCpu) {
    const std::vector<unsigned char> poison(kSharedBytes, kPoisonByte);
    shared_ = RepeatedMemory::make(poison, bytes + 2 * kGuardBytes);
  }
  if (shared_ == nullptr) {
    whole_ = Buffer(memory, bytes, true);
    data_ = static_cast<char*>(whole_.data());
    return;
  }
  data_ = shared_->data() + kGuardBytes;
  shared_->set_apart(0, kGuardBytes, kPoisonByte);
  shared_->set_apart(kGuardBytes + bytes, kGuardBytes, kPoisonByte);
  for (const std::int64_t row : looked_at) {
    shared_->set_apart(kGuardBytes + static_cast<std::size_t>(row * row_bytes),
                       static_cast<std::size_t>(row_bytes), kPoisonByte);
  }
}

std::vector<unsigned char> LargeOutput::row(std::int64_t row) const {
  std::vector<unsigned char> bytes(row_bytes_);
  memory_.copy_out(bytes.data(), data_ + row * row_bytes_, bytes.size());
  return bytes;
}

bool LargeOutput::guards_intact() const {
  if (shared_ == nullptr) return whole_.guards_intact();
  return is_poisoned(data_ - kGuardBytes, kGuardBytes) &&
         is_poisoned(data_ + rows_ * row_bytes_, kGuardBytes);
}

}  // namespace moegemm::testing
