#include "core/tuning/measure/race.h"

#include <algorithm>

namespace moegemm {
namespace {

class Race {
 public:
  Race(const std::vector<std::string>& names, const std::function<void(int)>& launch,
       Stopwatch& stopwatch, const RaceRules& rules,
       const std::function<bool(const RaceView&)>& watch)
      : launch_(launch), stopwatch_(stopwatch), rules_(rules), watch_(watch) {
    for (const std::string& name : names) result_.entrants.push_back({name, {}, false});
    begin_ = stopwatch.now_seconds();
  }

  RaceResult run() {
    // Round 0 loads the code.
    for (int round = 0; round <= rules_.rounds && !ended(); ++round) {
      if (round > 0 && survivors() < 2) break;
      for (std::size_t i = 0; i < result_.entrants.size() && !ended(); ++i) {
        if (!result_.entrants[i].given_up) step(static_cast<int>(i), round);
      }
      if (round >= rules_.least_rounds) give_up_the_hopeless();
    }
    result_.winner = winner();
    result_.seconds = elapsed();
    return std::move(result_);
  }

 private:
  double elapsed() const { return stopwatch_.now_seconds() - begin_; }
  bool ended() const { return result_.interrupted || result_.out_of_time; }

  int survivors() const {
    return static_cast<int>(std::count_if(result_.entrants.begin(), result_.entrants.end(),
                                          [](const RaceEntrant& e) { return !e.given_up; }));
  }

  int best() const {
    int best = -1;
    for (std::size_t i = 0; i < result_.entrants.size(); ++i) {
      const RaceEntrant& entrant = result_.entrants[i];
      if (entrant.us.empty()) continue;
      if (best < 0 || entrant.median_us() < result_.entrants[best].median_us()) {
        best = static_cast<int>(i);
      }
    }
    return best;
  }

  void step(int number, int round) {
    const double begin = elapsed();
    // A launch that would end past the budget is not begun.
    if (begin + longest_step_ > rules_.budget_seconds) {
      result_.out_of_time = true;
      return;
    }
    const double rounds_done = static_cast<double>(round) / (rules_.rounds + 1);
    const RaceView view = {result_.entrants, number, best(),
                           std::min(1.0, std::max(rounds_done, begin / rules_.budget_seconds)),
                           rules_.budget_seconds - begin};
    if (!watch_(view)) {
      result_.interrupted = true;
      return;
    }
    const double us = stopwatch_.time_us([&] { launch_(number); });
    if (round == 0) return;
    result_.entrants[number].us.push_back(us);
    longest_step_ = std::max(longest_step_, elapsed() - begin);
  }

  void give_up_the_hopeless() {
    const int leader = best();
    if (leader < 0) return;
    const double bound = rules_.hopeless * result_.entrants[leader].median_us();
    for (RaceEntrant& entrant : result_.entrants) {
      if (!entrant.us.empty() && entrant.least_us() > bound) entrant.given_up = true;
    }
  }

  int winner() const {
    const int leader = best();
    if (leader <= 0 || result_.entrants[0].us.empty()) return leader;
    const double first = result_.entrants[0].median_us();
    return first > rules_.margin * result_.entrants[leader].median_us() ? leader : 0;
  }

  const std::function<void(int)>& launch_;
  Stopwatch& stopwatch_;
  const RaceRules& rules_;
  const std::function<bool(const RaceView&)>& watch_;
  RaceResult result_;
  double begin_ = 0;
  double longest_step_ = 0;
};

}  // namespace

double RaceEntrant::median_us() const {
  if (us.empty()) return 0;
  std::vector<double> sorted = us;
  std::sort(sorted.begin(), sorted.end());
  const std::size_t middle = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

double RaceEntrant::least_us() const {
  return us.empty() ? 0 : *std::min_element(us.begin(), us.end());
}

RaceResult race(const std::vector<std::string>& names, const std::function<void(int)>& launch,
                Stopwatch& stopwatch, const RaceRules& rules,
                const std::function<bool(const RaceView&)>& watch) {
  return Race(names, launch, stopwatch, rules, watch).run();
}

}  // namespace moegemm
