#include "layer/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace moegemm::cli {
namespace {
constexpr int kBarCells = 24;
constexpr const char* kEraseLine = "\r\x1b[2K";
}  // namespace

Progress::Progress(int steps) : steps_(steps), visible_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (visible_) std::fputs(kEraseLine, stderr);
}

void Progress::step(const std::string& what) {
  if (visible_) {
    const int filled = std::min(kBarCells, kBarCells * begun_ / std::max(steps_, 1));
    const std::string bar = std::string(static_cast<std::size_t>(filled), '#') +
                            std::string(static_cast<std::size_t>(kBarCells - filled), '.');
    fmt::print(stderr, "{}[{}] {}/{} {}", kEraseLine, bar, begun_ + 1, steps_, what);
    std::fflush(stderr);
  }
  ++begun_;
}

}  // namespace moegemm::cli
