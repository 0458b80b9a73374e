#include "layer/random_tensor.h"

#include <algorithm>
#include <vector>

#include "moegemm/execution.h"
#include "testing/device/memory.h"
#include "testing/numerics/floats.h"
#include "testing/numerics/random.h"

namespace moegemm::cli {

RandomTensor::RandomTensor(std::uint64_t seed, DType dtype, float amplitude)
    : seed_(testing::mix_bits(seed + testing::kGoldenStep)), dtype_(dtype), amplitude_(amplitude) {}

std::uint64_t RandomTensor::bits(std::int64_t index) const {
  return testing::mix_bits(seed_ + static_cast<std::uint64_t>(index) * testing::kGoldenStep);
}

float RandomTensor::at(std::int64_t index) const {
  // 24 bits: as many as a float holds exactly, so that fp32 data exercises every mantissa bit.
  const float unit = static_cast<float>(bits(index) >> 40) * 0x1p-23F - 1.0F;
  return testing::round_to(dtype_, amplitude_ * unit);
}

void fill_in_chunks(testing::Memory& memory, void* data, std::int64_t count,
                    std::int64_t element_bytes, const ToldOfChunks& told,
                    const std::function<void(void* host, std::int64_t begin, std::int64_t first,
                                             std::int64_t last)>& make) {
  // 16 Mi elements: 64 MiB of staging at most, long enough that a chunk's fork and join vanish.
  constexpr std::int64_t kChunk = std::int64_t{1} << 24;
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
      make(host, begin, begin + chunk * worker / workers, begin + chunk * (worker + 1) / workers);
    });
    if (!in_place) memory.copy_in(target, host, chunk * element_bytes);
  }
}

void RandomTensor::fill(testing::Memory& memory, void* data, std::int64_t count,
                        const ToldOfChunks& told) const {
  fill_in_chunks(memory, data, count, size_bytes(dtype_), told,
                 [this](void* host, std::int64_t begin, std::int64_t first, std::int64_t last) {
                   for (std::int64_t i = first; i < last; ++i) {
                     testing::encode(dtype_, host, i - begin, at(i));
                   }
                 });
}

void RandomTensor::fill_repeating(testing::Memory& memory, void* data, std::int64_t count) const {
  constexpr std::int64_t kPeriod = 1 << 22;
  const std::int64_t element_bytes = size_bytes(dtype_);
  const std::int64_t period = std::min(count, kPeriod);
  std::byte* const first = static_cast<std::byte*>(data);
  fill(memory, first, period);
  for (std::int64_t begin = period; begin < count; begin += period) {
    memory.copy_within(first + begin * element_bytes, first,
                       std::min(period, count - begin) * element_bytes);
  }
}

}  // namespace moegemm::cli
