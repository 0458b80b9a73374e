#include "layer/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace moegemm::cli {
namespace {
constexpr int kBarCells = 24;
constexpr const char* kEraseLine = "\r\x1b[2K";
constexpr std::chrono::milliseconds kRedraw{100};
}  // namespace

Progress::Progress(int steps) : steps_(steps), visible_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  if (visible_) std::fputs(kEraseLine, stderr);
}

void Progress::step(const std::string& what) {
  ++begun_;
  phase_.clear();
  draw(what);
}

void Progress::phase(const std::string& what, int done, int of) {
  if (what == phase_ && Clock::now() - drawn_ < kRedraw) return;
  phase_ = what;
  draw(of > 1 ? fmt::format("{} {}/{}", what, done, of) : what);
}

void Progress::draw(const std::string& what) {
  if (!visible_) return;
  drawn_ = Clock::now();
  const int done = std::max(begun_ - 1, 0);
  const int filled = std::min(kBarCells, kBarCells * done / std::max(steps_, 1));
  const std::string bar = std::string(static_cast<std::size_t>(filled), '#') +
                          std::string(static_cast<std::size_t>(kBarCells - filled), '.');
  const std::chrono::duration<double> since = drawn_ - begin_;
  fmt::print(stderr, "{}[{}] {}/{} {}, {:.0f} s", kEraseLine, bar, begun_, steps_, what,
             since.count());
  std::fflush(stderr);
}

}  // namespace moegemm::cli
