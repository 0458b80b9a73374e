#pragma once

#include <cstdint>
#include <functional>

#include "core/tuning/measure/stopwatch.h"

namespace moegemm::testing {

/// Time passes only when a launch says so: `launch` sets `next_us`.
class FakeStopwatch final : public Stopwatch {
 public:
  double time_us(const std::function<void()>& launch) override {
    launch();
    ++launches;
    now += next_us * 1e-6 + overhead_seconds;
    return next_us;
  }
  double now_seconds() const override { return now; }

  double next_us = 0;
  double overhead_seconds = 0;
  double now = 100;
  int launches = 0;
};

}  // namespace moegemm::testing
