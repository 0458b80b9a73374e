#include "support/periodic_matrix.h"

#include <algorithm>

#include "support/floats.h"
#include "support/random.h"

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
  buffer_ = Buffer(memory, bytes());
  const std::int64_t block_bytes = static_cast<std::int64_t>(block_bytes_.size());
  for (std::int64_t begin = 0; begin < bytes(); begin += block_bytes) {
    memory.copy_in(static_cast<char*>(buffer_.data()) + begin, block_bytes_.data(),
                   std::min(block_bytes, bytes() - begin));
  }
}

std::vector<float> PeriodicMatrix::row(std::int64_t r) const {
  std::vector<float> values(cols_);
  for (std::int64_t c = 0; c < cols_; ++c) values[c] = at(r, c);
  return values;
}

}  // namespace moegemm::testing
