#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace moegemm::cpu::simd {

/// Whether huge pages are worth asking for, from how long the last ones took. Mostly they take a
/// fifth of what the small pages of as much memory take. But a virtual machine may have given its
/// free memory back to the host, which then has to find every small page of it anew: four times
/// what small pages take, because those mostly come from memory that was in use a moment ago. Huge
/// pages that were had once tend to come back fast; the first ones of a process are no measure.
class HugePageRecord {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr int kSlowInARow = 4;     ///< slow buffers until the next ones go without
  static constexpr int kFreshWithout = 32;  ///< fresh buffers until huge pages are tried again

  bool worthwhile() const { return fresh_without_.load(std::memory_order_relaxed) == 0; }

  /// A buffer of so many huge pages took that long to touch.
  void touched(std::int64_t pages, Clock::duration time) {
    if (time < pages * kFreshPage) return;
    if (time < pages * kSlowPage) return slow_in_a_row_.store(0, std::memory_order_relaxed);
    if (slow_in_a_row_.fetch_add(1, std::memory_order_relaxed) + 1 < kSlowInARow) return;
    slow_in_a_row_.store(kSlowInARow - 1, std::memory_order_relaxed);
    fresh_without_.store(kFreshWithout, std::memory_order_relaxed);
  }

  /// A fresh buffer got small pages.
  void went_without() {
    std::int64_t left = fresh_without_.load(std::memory_order_relaxed);
    while (left > 0 &&
           !fresh_without_.compare_exchange_weak(left, left - 1, std::memory_order_relaxed)) {
    }
  }

 private:
  static constexpr std::chrono::microseconds kFreshPage{20};   ///< less: it was there already
  static constexpr std::chrono::microseconds kSlowPage{1000};  ///< what its small pages would take

  std::atomic<int> slow_in_a_row_ = 0;
  std::atomic<std::int64_t> fresh_without_ = 0;
};

}  // namespace moegemm::cpu::simd
