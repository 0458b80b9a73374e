#include "core/tuning/measure/race.h"

#include <gtest/gtest.h>

#include <map>

#include "unit/core/tuning/measure/fake_stopwatch.h"

namespace moegemm {
namespace {

using testing::FakeStopwatch;

class RaceTest : public ::testing::Test {
 protected:
  /// Each entrant takes `us[i]`, or what `varying` says for its n-th launch.
  RaceResult run(const std::vector<double>& us) {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < us.size(); ++i) names.push_back(std::to_string(i));
    return race(
        names,
        [&](int i) {
          order.push_back(i);
          stopwatch.next_us = varying ? varying(i, launches[i]++) : us[i];
        },
        stopwatch, rules, watch);
  }

  FakeStopwatch stopwatch;
  RaceRules rules;
  std::function<bool(const RaceView&)> watch = [](const RaceView&) { return true; };
  std::function<double(int, int)> varying;
  std::map<int, int> launches;
  std::vector<int> order;
};

TEST_F(RaceTest, SmallestMedianWins) {
  const RaceResult result = run({100, 95, 98});
  EXPECT_EQ(result.winner, 1);
  EXPECT_EQ(result.entrants[1].median_us(), 95);
  EXPECT_FALSE(result.interrupted);
  EXPECT_FALSE(result.out_of_time);
}

TEST_F(RaceTest, FirstEntrantStaysUnlessBeatenByMoreThanTheNoise) {
  EXPECT_EQ(run({100, 99.5}).winner, 0);
  EXPECT_EQ(run({100, 98}).winner, 1);
}

TEST_F(RaceTest, EntrantsTakeTurns) {
  run({100, 101});
  ASSERT_GE(order.size(), 6u);
  for (std::size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], static_cast<int>(i % 2));
}

TEST_F(RaceTest, FirstLaunchOfEachIsNotCounted) {
  varying = [](int i, int launch) { return launch == 0 ? 1e5 : 100.0 + i; };
  const RaceResult result = run({0, 0});
  EXPECT_EQ(result.entrants[0].median_us(), 100);
  EXPECT_EQ(result.entrants[1].median_us(), 101);
}

TEST_F(RaceTest, OneSlowLaunchDoesNotDecide) {
  varying = [](int i, int launch) {
    return i == 1 && launch == 1 ? 1000.0 : i == 1 ? 90.0 : 100.0;
  };
  EXPECT_EQ(run({0, 0}).winner, 1);
}

TEST_F(RaceTest, HopelessEntrantsLeaveEarly) {
  const RaceResult result = run({100, 300, 105});
  EXPECT_TRUE(result.entrants[1].given_up);
  EXPECT_EQ(result.entrants[1].us.size(), static_cast<std::size_t>(rules.least_rounds));
  EXPECT_FALSE(result.entrants[2].given_up);
  EXPECT_EQ(result.entrants[2].us.size(), static_cast<std::size_t>(rules.rounds));
}

TEST_F(RaceTest, RaceEndsWhenOneIsLeft) {
  const RaceResult result = run({100, 300});
  EXPECT_EQ(result.winner, 0);
  EXPECT_EQ(result.entrants[0].us.size(), static_cast<std::size_t>(rules.least_rounds));
}

TEST_F(RaceTest, BudgetIsKept) {
  rules.budget_seconds = 0.01;
  const RaceResult result = run({1000, 990, 995});
  EXPECT_TRUE(result.out_of_time);
  EXPECT_LE(result.seconds, rules.budget_seconds);
  EXPECT_GE(result.winner, 0);
}

TEST_F(RaceTest, NoBudgetMeansNoResult) {
  rules.budget_seconds = 0;
  stopwatch.now = 0;
  rules.budget_seconds = -1;
  const RaceResult result = run({100, 90});
  EXPECT_EQ(result.winner, -1);
  EXPECT_EQ(stopwatch.launches, 0);
}

TEST_F(RaceTest, InterruptionKeepsWhatWasFound) {
  int asked = 0;
  watch = [&](const RaceView&) { return ++asked <= 5; };
  const RaceResult result = run({100, 80});
  EXPECT_TRUE(result.interrupted);
  EXPECT_EQ(stopwatch.launches, 5);
  EXPECT_EQ(result.winner, 1);
}

TEST_F(RaceTest, WatcherSeesTheBestSoFarAndTheTimeLeft) {
  double least_left = rules.budget_seconds;
  double most_done = 0;
  watch = [&](const RaceView& view) {
    EXPECT_TRUE(view.best < 0 || view.entrants[view.best].median_us() > 0);
    EXPECT_LE(view.seconds_left, least_left);
    EXPECT_GE(view.done, most_done);
    least_left = view.seconds_left;
    most_done = view.done;
    return true;
  };
  run({100, 95});
  EXPECT_LT(least_left, rules.budget_seconds);
  EXPECT_GT(most_done, 0.9);
  EXPECT_LE(most_done, 1);
}

}  // namespace
}  // namespace moegemm
