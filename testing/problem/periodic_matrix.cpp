#include "testing/problem/periodic_matrix.h"

#include <algorithm>

#include "testing/numerics/floats.h"
#include "testing/numerics/random.h"

namespace moegemm::testing {

PeriodicMatrix::PeriodicMatrix(DType dtype, std::int64_t rows, std::int64_t cols,
                               std::uint64_t seed)
    : dtype_(dtype),
      rows_(rows),
      cols_(cols),
      block_bytes_(kPeriod * size_bytes(dtype)),
      block_(kPeriod) {
  Random random(seed);
  for (std::int64_t i = 0; i < kPeriod; ++i) {
    encode(dtype, block_bytes_.data(), i, random.symmetric());
    block_[i] = decode(dtype, block_bytes_.data(), i);
  }
}

void PeriodicMatrix::allocate(Memory& memory) {
  if (bytes() == 0) return;
  if (memory.device().type == DeviceType::kCpu) {
    repeated_ = RepeatedMemory::make(block_bytes_, static_cast<std::size_t>(bytes()));
    if (repeated_ != nullptr) return;
  }
  buffer_ = Buffer(memory, bytes());
  char* data = static_cast<char*>(buffer_.data());
  std::int64_t filled = std::min(static_cast<std::int64_t>(block_bytes_.size()), bytes());
  memory.copy_in(data, block_bytes_.data(), filled);
  // Whole periods are doubled in place: gigabytes need not cross from the host.
  for (; filled < bytes(); filled = std::min(2 * filled, bytes())) {
    memory.copy_within(data + filled, data, std::min(filled, bytes() - filled));
  }
}

std::vector<float> PeriodicMatrix::row(std::int64_t r) const {
  std::vector<float> values(cols_);
  for (std::int64_t c = 0; c < cols_;) {
    const std::int64_t from = (r * cols_ + c) % kPeriod;
    const std::int64_t count = std::min(kPeriod - from, cols_ - c);
    std::copy_n(block_.begin() + from, count, values.begin() + c);
    c += count;
  }
  return values;
}

}  // namespace moegemm::testing
