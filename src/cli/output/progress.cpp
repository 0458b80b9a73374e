#include "output/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace moegemm::cli {
namespace {
using Clock = std::chrono::steady_clock;
constexpr int kBarCells = 24;
constexpr int kBesideWords = kBarCells + 4;  ///< brackets, a space, and the last column
constexpr const char* kEraseLine = "\r\x1b[2K";
constexpr std::chrono::milliseconds kRedraw{100};

/// How many characters fit beside the bar: a line that wraps stays on the terminal.
std::size_t room_for_words() {
  winsize size{};
  int columns = 80;
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) columns = size.ws_col;
  return static_cast<std::size_t>(std::max(columns - kBesideWords, 0));
}
}  // namespace

ProgressLine::ProgressLine() : visible_(isatty(STDERR_FILENO) != 0) {}

ProgressLine::~ProgressLine() {
  if (visible_) std::fputs(kEraseLine, stderr);  // not with fmt, which may throw
}

void ProgressLine::draw(double done, const std::string& words, bool at_once) {
  const Clock::time_point now = Clock::now();
  if (!visible_ || (!at_once && now - drawn_ < kRedraw)) return;
  drawn_ = now;
  const int filled = static_cast<int>(kBarCells * std::clamp(done, 0.0, 1.0));
  fmt::print(stderr, "{}[{:#<{}}{:.<{}}] {}", kEraseLine, "", filled, "", kBarCells - filled,
             words.substr(0, room_for_words()));
  std::fflush(stderr);
}

void Progress::step(const std::string& what) {
  ++begun_;
  phase_.clear();
  draw(what, true);
}

void Progress::phase(const std::string& what, int done, int of) {
  const bool same = what == phase_;
  phase_ = what;
  draw(of > 1 ? fmt::format("{} {}/{}", what, done, of) : what, !same);
}

void Progress::draw(const std::string& what, bool at_once) {
  const std::chrono::duration<double> since = Clock::now() - begin_;
  line_.draw(static_cast<double>(std::max(begun_ - 1, 0)) / std::max(steps_, 1),
             fmt::format("{}/{} {}, {:.0f} s", begun_, steps_, what, since.count()), at_once);
}

}  // namespace moegemm::cli
