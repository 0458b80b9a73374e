#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace moegemm::testing {

/// Splits [0, count) over the machine's cores: `body(begin, end)` per range. `cost` is the work of
/// the whole, in multiply-adds: below a million, starting threads would cost more than it saves.
inline void parallel_for(std::int64_t count, std::int64_t cost,
                         const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count == 0) return;
  const std::int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::int64_t workers =
      std::clamp<std::int64_t>(cost / 1'000'000, 1, std::min(cores, count));
  std::vector<std::thread> threads;
  for (std::int64_t i = 1; i < workers; ++i) {
    threads.emplace_back([&, i] { body(count * i / workers, count * (i + 1) / workers); });
  }
  body(0, count / workers);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace moegemm::testing
