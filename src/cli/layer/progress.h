#pragma once

#include <chrono>
#include <string>

namespace moegemm::cli {

/// One line on stderr that says what runs, how far along it is and since when. Silent unless stderr
/// is a terminal, so logs and pipes stay clean; erased when done.
class Progress {
 public:
  explicit Progress(int steps);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// The next step begins.
  void step(const std::string& what);
  /// What happens inside or between steps; the same one is redrawn ten times a second at most.
  void phase(const std::string& what, int done, int of);

 private:
  using Clock = std::chrono::steady_clock;

  void draw(const std::string& what);

  int steps_;
  int begun_ = 0;
  bool visible_;
  std::string phase_;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point drawn_;
};

}  // namespace moegemm::cli
