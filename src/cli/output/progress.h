#pragma once

#include <chrono>
#include <string>

namespace moegemm::cli {

/// One line on stderr that begins with a bar. Silent unless stderr is a terminal, so that logs and
/// pipes stay clean; erased when done.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  /// `done` is from 0 to 1. Redrawn ten times a second at most, unless `at_once`.
  void draw(double done, const std::string& words, bool at_once = false);

 private:
  bool visible_;
  std::chrono::steady_clock::time_point drawn_;
};

/// What runs, how far along it is and since when.
class Progress {
 public:
  explicit Progress(int steps) : steps_(steps) {}

  /// The next step begins.
  void step(const std::string& what);
  /// What happens inside or between steps.
  void phase(const std::string& what, int done, int of);

 private:
  void draw(const std::string& what, bool at_once);

  int steps_;
  int begun_ = 0;
  std::string phase_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  ProgressLine line_;
};

}  // namespace moegemm::cli
