#include "conformance/driver/large_weights.h"

#include <algorithm>

#include "testing/numerics/floats.h"
#include "testing/numerics/random.h"
#include "testing/numerics/weight_formats.h"

namespace moegemm::testing {

void PeriodicBytes::allocate(Memory& memory) {
  if (memory.device().type == DeviceType::kCpu) {
    repeated_ = RepeatedMemory::make(block_, static_cast<std::size_t>(bytes_));
    if (repeated_ != nullptr) return;
  }
  buffer_ = Buffer(memory, bytes_);
  char* data = static_cast<char*>(buffer_.data());
  std::int64_t filled = std::min(kPeriod, bytes_);
  memory.copy_in(data, block_.data(), filled);
  for (; filled < bytes_; filled = std::min(2 * filled, bytes_)) {
    memory.copy_within(data + filled, data, std::min(filled, bytes_ - filled));
  }
}

LargeWeights::LargeWeights(const Quantization& quantization, std::int64_t experts, std::int64_t n,
                           std::int64_t k, std::uint64_t seed)
    : quantization_(quantization),
      experts_(experts),
      n_(n),
      k_(k),
      values_(experts * quantization.expert_bytes(n, k)),
      scales_(experts * quantization.expert_scales(n, k) * scale_bytes(quantization.scale_type)),
      decoded_scales_(PeriodicBytes::kPeriod / scale_bytes(quantization.scale_type)) {
  Random random(seed);
  for (unsigned char& byte : values_.block()) {
    byte = static_cast<unsigned char>(random.bits());
    if (quantization.format == WeightFormat::kFp8 && (byte & 127) == 127) byte ^= 1;  // no NaN
  }
  for (std::size_t byte = 0; byte < decoded_.size(); ++byte) {
    for (const bool second : {false, true}) {
      decoded_[byte][second] =
          packed_value(quantization.format, static_cast<std::uint8_t>(byte), second);
    }
  }
  const auto largest = static_cast<float>(made_format(quantization.format).largest);
  for (std::size_t i = 0; i < decoded_scales_.size(); ++i) {
    const float scale = (0.5f + 0.25f * random.symmetric()) / largest;
    const auto index = static_cast<std::int64_t>(i);
    encode_scale(quantization.scale_type, scales_.block().data(), index, scale);
    decoded_scales_[i] = decode_scale(quantization.scale_type, scales_.block().data(), index);
  }
}

void LargeWeights::allocate(Memory& memory) {
  values_.allocate(memory);
  scales_.allocate(memory);
}

ScalesView LargeWeights::scales(Device device) const {
  const bool flat = quantization_.format == WeightFormat::kNf4;
  const std::int64_t columns = quantization_.scale_columns(n_, k_);
  ScalesView view;
  view.data = scales_.data();
  view.type = quantization_.scale_type;
  view.device = device;
  view.rank = flat ? 2 : 3;
  view.shape = {experts_, flat ? columns : quantization_.scale_rows(n_), flat ? 0 : columns};
  return view;
}

std::vector<float> LargeWeights::row(std::int64_t row_of_stack) const {
  const std::int64_t expert = row_of_stack / n_, row = row_of_stack % n_;
  const std::int64_t first_byte = expert * quantization_.expert_bytes(n_, k_);
  const std::int64_t first_scale = expert * quantization_.expert_scales(n_, k_);
  const std::int64_t in_byte = 8 / quantization_.bits();
  const auto period_of_scales = static_cast<std::int64_t>(decoded_scales_.size());
  std::vector<float> values(k_);
  for (std::int64_t column = 0; column < k_; ++column) {
    const std::int64_t place = row * k_ + column;
    const unsigned char byte =
        values_.block()[(first_byte + place / in_byte) % PeriodicBytes::kPeriod];
    const std::int64_t scale = first_scale + quantization_.scale_of(row, column, n_, k_);
    const auto exact = static_cast<float>(
        decoded_[byte][place % in_byte] *
        static_cast<double>(decoded_scales_[static_cast<std::size_t>(scale % period_of_scales)]));
    unsigned char rounded[2];
    encode(DType::kBFloat16, rounded, 0, exact);
    values[column] = decode(DType::kBFloat16, rounded, 0);
  }
  return values;
}

}  // namespace moegemm::testing
