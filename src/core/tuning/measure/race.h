#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/tuning/measure/stopwatch.h"

/// The measuring itself: kernels take turns, so that a clock that changes hits them alike, and
/// those that cannot win any more leave.
namespace moegemm {

struct RaceRules {
  double budget_seconds = 2;
  /// The median of 15 launches scatters by about 1% on a power-limited card.
  int rounds = 15;
  /// Rounds after which a kernel may be given up.
  int least_rounds = 2;
  /// A kernel is given up when even its fastest launch took this many times the best median.
  double hopeless = 1.10;
  /// The first entrant, the heuristic's, stays unless another one is faster by this factor.
  double margin = 1.01;
};

struct RaceEntrant {
  std::string name;
  std::vector<double> us;  ///< of each timed launch
  bool given_up = false;

  double median_us() const;  ///< 0 before the first launch
  double least_us() const;
};

/// What a race looks like shortly before a launch.
struct RaceView {
  const std::vector<RaceEntrant>& entrants;
  int next = 0;   ///< about to be timed
  int best = -1;  ///< smallest median so far; -1 before the first launch
  double done = 0;
  double seconds_left = 0;
};

struct RaceResult {
  std::vector<RaceEntrant> entrants;
  int winner = -1;           ///< -1: nothing was timed
  bool interrupted = false;  ///< `watch` said stop
  bool out_of_time = false;
  double seconds = 0;
};

/// Runs `launch(i)` for the entrants in turn. `watch` is asked before each launch; false ends the
/// race. Each entrant's first launch only loads code and is not timed.
RaceResult race(const std::vector<std::string>& names, const std::function<void(int)>& launch,
                Stopwatch& stopwatch, const RaceRules& rules,
                const std::function<bool(const RaceView&)>& watch);

}  // namespace moegemm
