#pragma once

#include <string>

namespace moegemm::cli {

/// One line on stderr that says what runs and how far along it is. Silent unless stderr is a
/// terminal, so logs and pipes stay clean; erased when done.
class Progress {
 public:
  explicit Progress(int steps);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// The next step begins.
  void step(const std::string& what);

 private:
  int steps_;
  int begun_ = 0;
  bool visible_;
};

}  // namespace moegemm::cli
