#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "moegemm/tune.h"

namespace moegemm::testing {

/// Lends host memory, in blocks of at most `most_bytes`, and stops after so many launches.
class HostSupport final : public TuningSupport {
 public:
  void* allocate(std::int64_t bytes, Device) override {
    asked.push_back(bytes);
    if (bytes > most_bytes) return nullptr;
    constexpr std::size_t kAlignment = 256;
    blocks.emplace_back(static_cast<std::size_t>(bytes) + kAlignment);
    void* place = blocks.back().data();
    std::size_t space = blocks.back().size();
    return std::align(kAlignment, static_cast<std::size_t>(bytes), place, space);
  }
  bool progress(const TuneProgress& now) override {
    ++calls;
    last_best = now.best;
    if (on_progress) on_progress();
    return calls <= stop_after;
  }
  std::int64_t most_bytes = std::numeric_limits<std::int64_t>::max();
  int calls = 0;
  int stop_after = 1 << 30;
  std::function<void()> on_progress;
  std::string last_best;
  std::vector<std::int64_t> asked;
  std::list<std::vector<std::byte>> blocks;
};

}  // namespace moegemm::testing
