#include "layer/tensors/random_tensor.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "moegemm/executor.h"
#include "testing/device/memory.h"

namespace moegemm::cli {
namespace {

std::uint16_t bf16_bits(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float bf16_value(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

float fp16_value(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const int mantissa = bits & 0x3ff;
  float magnitude = 0;
  if (exponent == 0x1f) {
    magnitude = mantissa != 0 ? NAN : INFINITY;
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(mantissa | 0x400), exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

std::uint16_t fp16_bits(float value) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7e00);
  if (magnitude >= 65520.0F)
    return static_cast<std::uint16_t>(sign | 0x7c00);  // rounds to infinity
  // Below 2^-14 the spacing stays 2^-24; above, 11 significant bits.
  const int exponent = magnitude < 0x1p-14F ? -14 : std::ilogb(magnitude);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  // For normal numbers `steps` carries the implicit bit, which adds the one missing exponent step.
  const int bits = magnitude < 0x1p-14F ? steps : ((exponent + 14) << 10) + steps;
  return static_cast<std::uint16_t>(sign | bits);
}

/// splitmix64's finaliser: every output bit depends on every input bit.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

float round_to(DType dtype, float value) {
  switch (dtype) {
    case DType::kBFloat16:
      return bf16_value(bf16_bits(value));
    case DType::kFloat16:
      return fp16_value(fp16_bits(value));
    default:
      return value;
  }
}

double load_element(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kBFloat16:
      return bf16_value(static_cast<const std::uint16_t*>(data)[index]);
    case DType::kFloat16:
      return fp16_value(static_cast<const std::uint16_t*>(data)[index]);
    case DType::kFloat32:
      return static_cast<const float*>(data)[index];
    case DType::kInt32:
      return static_cast<const std::int32_t*>(data)[index];
    case DType::kInt64:
      return static_cast<double>(static_cast<const std::int64_t*>(data)[index]);
  }
  return NAN;
}

void store_element(void* data, DType dtype, std::int64_t index, float value) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<std::uint16_t*>(data)[index] = bf16_bits(value);
      break;
    case DType::kFloat16:
      static_cast<std::uint16_t*>(data)[index] = fp16_bits(value);
      break;
    case DType::kFloat32:
      static_cast<float*>(data)[index] = value;
      break;
    case DType::kInt32:
      static_cast<std::int32_t*>(data)[index] = static_cast<std::int32_t>(value);
      break;
    case DType::kInt64:
      static_cast<std::int64_t*>(data)[index] = static_cast<std::int64_t>(value);
      break;
  }
}

RandomTensor::RandomTensor(std::uint64_t seed, DType dtype, float amplitude)
    : seed_(mix(seed + 0x9e3779b97f4a7c15u)), dtype_(dtype), amplitude_(amplitude) {}

float RandomTensor::at(std::int64_t index) const {
  const std::uint64_t bits = mix(seed_ + static_cast<std::uint64_t>(index) * 0x9e3779b97f4a7c15u);
  // 24 bits: as many as a float holds exactly, so that fp32 data exercises every mantissa bit.
  const float unit = static_cast<float>(bits >> 40) * 0x1p-23F - 1.0F;
  return round_to(dtype_, amplitude_ * unit);
}

void RandomTensor::fill(testing::Memory& memory, void* data, std::int64_t count,
                        const std::function<void(int chunk, int chunks)>& told) const {
  // 16 Mi elements: 64 MiB of staging at most, long enough that a chunk's fork and join vanish.
  constexpr std::int64_t kChunk = std::int64_t{1} << 24;
  const std::int64_t element_bytes = size_bytes(dtype_);
  const bool in_place = memory.device().type == DeviceType::kCpu;
  std::vector<std::byte> staging(
      in_place ? 0 : static_cast<std::size_t>(std::min(count, kChunk) * element_bytes));
  Executor& executor = default_executor();
  const int workers = executor.concurrency();
  const auto chunks = static_cast<int>((count + kChunk - 1) / kChunk);
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    if (told) told(static_cast<int>(begin / kChunk) + 1, chunks);
    const std::int64_t chunk = std::min(kChunk, count - begin);
    std::byte* target = static_cast<std::byte*>(data) + begin * element_bytes;
    void* host = in_place ? target : staging.data();
    executor.run(workers, [&](int worker) {
      const std::int64_t from = chunk * worker / workers;
      const std::int64_t to = chunk * (worker + 1) / workers;
      for (std::int64_t i = from; i < to; ++i) store_element(host, dtype_, i, at(begin + i));
    });
    if (!in_place) memory.copy_in(target, host, chunk * element_bytes);
  }
}

}  // namespace moegemm::cli
