#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace moegemm::cuda {

/// Hands out the tile-counter slots of one device: which launch may use which slot, without any
/// CUDA call. See tile_counters.h for why. Safe from any thread.
class TileSlots {
 public:
  /// Streams a program has used, ever: slots are not given back, because the kernels of a destroyed
  /// stream may still run.
  static constexpr int kStreamSlots = 4096;
  /// Captured launches, ever: 64 layers x 2 products in 64 graphs take 8192.
  static constexpr int kCaptureSlots = 262144;
  static constexpr int kSlots = kStreamSlots + kCaptureSlots;

  /// The slot of this stream, always the same; empty once 4096 other streams have theirs.
  std::optional<int> for_stream(std::uint64_t stream_id) {
    const std::lock_guard lock(mutex_);
    if (const auto found = of_stream_.find(stream_id); found != of_stream_.end()) {
      return found->second;
    }
    const int slot = static_cast<int>(of_stream_.size());
    if (slot == kStreamSlots) {
      return std::nullopt;
    }
    of_stream_.emplace(stream_id, slot);
    return slot;
  }

  /// A slot that nobody had and nobody else gets; empty when all are taken.
  std::optional<int> for_captured_launch() {
    int taken = captured_.load(std::memory_order_relaxed);
    do {
      if (taken == kCaptureSlots) {
        return std::nullopt;
      }
    } while (!captured_.compare_exchange_weak(taken, taken + 1, std::memory_order_relaxed));
    return kStreamSlots + taken;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::uint64_t, int> of_stream_;
  std::atomic<int> captured_ = 0;
};

}  // namespace moegemm::cuda
