#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace moegemm::cpu::simd {

/// Whether huge pages are worth asking for, from how long the last ones took. Mostly they take a
/// fifth of what the small pages of as much memory take. But a virtual machine may have given its
/// free memory back to the host, which then has to find every small page of it anew: four times
/// what small pages take, because those mostly come from memory that was in use a moment ago. Huge
/// pages that were had once mostly come back fast, so the first ones are no measure; they keep
/// coming slowly where others take buffers of the same size in small pages in between, so each
/// size has a record of its own.
class HugePageRecord {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr int kSlowInARow = 4;     ///< slow buffers until the next ones go without
  static constexpr int kFreshWithout = 12;  ///< fresh buffers until huge pages are tried again

  bool worthwhile(std::int64_t pages) const {
    return of(pages).fresh_without.load(std::memory_order_relaxed) == 0;
  }

  /// A buffer of so many huge pages took that long to touch.
  void touched(std::int64_t pages, Clock::duration time) {
    if (time < pages * kFreshPage) return;
    Size& size = of(pages);
    if (time < pages * kSlowPage) return size.slow_in_a_row.store(0, std::memory_order_relaxed);
    if (size.slow_in_a_row.fetch_add(1, std::memory_order_relaxed) + 1 < kSlowInARow) return;
    size.slow_in_a_row.store(0, std::memory_order_relaxed);
    size.fresh_without.store(kFreshWithout, std::memory_order_relaxed);
  }

  /// A fresh buffer that could have had so many huge pages got small ones.
  void went_without(std::int64_t pages) {
    std::atomic<int>& without = of(pages).fresh_without;
    int left = without.load(std::memory_order_relaxed);
    while (left > 0 && !without.compare_exchange_weak(left, left - 1, std::memory_order_relaxed)) {
    }
  }

 private:
  static constexpr std::chrono::microseconds kFreshPage{20};   ///< less: it was there already
  static constexpr std::chrono::microseconds kSlowPage{1000};  ///< what its small pages would take

  struct Size {
    std::atomic<int> slow_in_a_row = 0;
    std::atomic<int> fresh_without = 0;
  };

  /// Sizes that differ by less than a factor of two share a record.
  const Size& of(std::int64_t pages) const {
    return sizes_[static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(pages)))];
  }
  Size& of(std::int64_t pages) {
    return sizes_[static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(pages)))];
  }

  std::array<Size, 65> sizes_;
};

}  // namespace moegemm::cpu::simd
