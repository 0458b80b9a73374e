#include "layer/token_routing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

namespace moegemm::cli {
namespace {

class RoutingPatterns : public ::testing::TestWithParam<RoutingPattern> {};

TEST_P(RoutingPatterns, TokensGetDifferentExpertsInRange) {
  const TokenRouting routing = make_routing(GetParam(), 100, 6, 8, 3);
  for (int t = 0; t < 100; ++t) {
    const auto* ids = routing.expert_ids.data() + t * 6;
    EXPECT_EQ(std::set<int>(ids, ids + 6).size(), 6);
    for (int s = 0; s < 6; ++s) {
      EXPECT_GE(ids[s], 0);
      EXPECT_LT(ids[s], 8);
    }
  }
}

TEST_P(RoutingPatterns, WeightsOfATokenArePositiveAndSumToOne) {
  const TokenRouting routing = make_routing(GetParam(), 50, 4, 8, 3);
  for (int t = 0; t < 50; ++t) {
    const float* weights = routing.weights.data() + t * 4;
    EXPECT_GT(*std::min_element(weights, weights + 4), 0);
    EXPECT_NEAR(std::accumulate(weights, weights + 4, 0.0F), 1.0F, 1e-5F);
  }
}

TEST_P(RoutingPatterns, SortedOrderIsStableAndCoversEveryRow) {
  const TokenRouting routing = make_routing(GetParam(), 64, 3, 7, 11);
  EXPECT_EQ(routing.segment_begin.size(), 8);
  EXPECT_EQ(routing.segment_begin.back(), 64 * 3);
  EXPECT_EQ(std::set<int>(routing.gather_indices.begin(), routing.gather_indices.end()).size(),
            64 * 3);
  for (std::size_t r = 1; r < routing.gather_indices.size(); ++r) {
    const int before = routing.expert_of_row[r - 1];
    const int here = routing.expert_of_row[r];
    EXPECT_EQ(here, routing.expert_ids[static_cast<std::size_t>(routing.gather_indices[r])]);
    EXPECT_LE(before, here);
    if (before == here) {
      EXPECT_LT(routing.gather_indices[r - 1], routing.gather_indices[r]);
    }
  }
}

TEST_P(RoutingPatterns, NoTokensGiveEmptySegments) {
  const TokenRouting routing = make_routing(GetParam(), 0, 2, 4, 0);
  EXPECT_TRUE(routing.gather_indices.empty());
  EXPECT_EQ(routing.m_sizes, std::vector<std::int32_t>(4, 0));
}

INSTANTIATE_TEST_SUITE_P(All, RoutingPatterns,
                         ::testing::Values(RoutingPattern::kUniform, RoutingPattern::kZipf,
                                           RoutingPattern::kBalanced),
                         [](const auto& pattern) { return to_string(pattern.param); });

TEST(RoutingPattern, BalancedCountsDifferByAtMostOne) {
  const TokenRouting routing = make_routing(RoutingPattern::kBalanced, 50, 3, 8, 0);
  const auto [least, most] = std::minmax_element(routing.m_sizes.begin(), routing.m_sizes.end());
  EXPECT_LE(*most - *least, 1);
}

TEST(RoutingPattern, ZipfHasAHotExpert) {
  const TokenRouting routing = make_routing(RoutingPattern::kZipf, 4000, 1, 64, 1);
  // Rank 1 of 64 has probability 1 / H(64) = 0.21; uniform would give 0.016.
  EXPECT_GT(*std::max_element(routing.m_sizes.begin(), routing.m_sizes.end()), 4000 * 0.15);
}

TEST(RoutingPattern, EachHasANameOfItsOwn) {
  std::vector<std::string> names;
  for (const auto& entry : kRoutingPatterns) names.emplace_back(to_string(entry.value));
  EXPECT_EQ(names, (std::vector<std::string>{"uniform", "zipf", "balanced"}));
}

}  // namespace
}  // namespace moegemm::cli
