#include "layer/token_routing.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <random>

namespace moegemm::cli {
namespace {

/// topk different experts per token, drawn without replacement in proportion to exp(log_odds):
/// the largest of log-odds plus Gumbel noise.
std::vector<std::int32_t> draw_experts(const std::vector<double>& log_odds, std::int64_t tokens,
                                       std::int64_t topk, std::mt19937_64& random) {
  const auto experts = static_cast<std::int64_t>(log_odds.size());
  std::extreme_value_distribution<double> gumbel;
  std::vector<double> score(log_odds.size());
  std::vector<std::int32_t> order(log_odds.size());
  std::vector<std::int32_t> ids;
  ids.reserve(static_cast<std::size_t>(tokens * topk));
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t e = 0; e < experts; ++e) score[e] = log_odds[e] + gumbel(random);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + topk, order.end(),
                      [&](std::int32_t a, std::int32_t b) { return score[a] > score[b]; });
    ids.insert(ids.end(), order.begin(), order.begin() + topk);
  }
  return ids;
}

std::vector<std::int32_t> choose_experts(RoutingPattern pattern, std::int64_t tokens,
                                         std::int64_t topk, std::int64_t experts,
                                         std::mt19937_64& random) {
  if (pattern == RoutingPattern::kBalanced) {
    // Consecutive experts: topk <= E of them are different, and the counts differ by at most one.
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * topk));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<std::int32_t>(i % static_cast<std::size_t>(experts));
    }
    return ids;
  }
  std::vector<double> log_odds(static_cast<std::size_t>(experts), 0.0);
  if (pattern == RoutingPattern::kZipf) {
    for (std::size_t e = 0; e < log_odds.size(); ++e) log_odds[e] = -std::log(double(e + 1));
    // Hot experts sit anywhere, not first.
    std::shuffle(log_odds.begin(), log_odds.end(), random);
  }
  return draw_experts(log_odds, tokens, topk, random);
}

std::vector<float> draw_weights(std::int64_t tokens, std::int64_t topk, std::mt19937_64& random) {
  std::uniform_real_distribution<float> positive(0.1F, 1.0F);
  std::vector<float> weights(static_cast<std::size_t>(tokens * topk));
  for (float& weight : weights) weight = positive(random);
  for (std::int64_t t = 0; t < tokens; ++t) {
    float* row = weights.data() + t * topk;
    const float sum = std::accumulate(row, row + topk, 0.0F);
    for (std::int64_t s = 0; s < topk; ++s) row[s] /= sum;
  }
  return weights;
}

void sort_by_expert(TokenRouting& routing, std::int64_t experts) {
  const std::vector<std::int32_t>& ids = routing.expert_ids;
  routing.gather_indices.resize(ids.size());
  std::iota(routing.gather_indices.begin(), routing.gather_indices.end(), 0);
  std::stable_sort(routing.gather_indices.begin(), routing.gather_indices.end(),
                   [&](std::int32_t a, std::int32_t b) { return ids[a] < ids[b]; });
  routing.m_sizes.assign(static_cast<std::size_t>(experts), 0);
  routing.expert_of_row.reserve(ids.size());
  for (const std::int32_t flat : routing.gather_indices) {
    ++routing.m_sizes[ids[flat]];
    routing.expert_of_row.push_back(ids[flat]);
  }
  routing.segment_begin.assign(1, 0);
  std::partial_sum(routing.m_sizes.begin(), routing.m_sizes.end(),
                   std::back_inserter(routing.segment_begin), std::plus<std::int64_t>());
}

}  // namespace

const char* to_string(RoutingPattern pattern) {
  return std::find_if(std::begin(kRoutingPatterns), std::end(kRoutingPatterns),
                      [&](const auto& entry) { return entry.value == pattern; })
      ->name;
}

TokenRouting make_routing(RoutingPattern pattern, std::int64_t tokens, std::int64_t topk,
                          std::int64_t experts, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  TokenRouting routing;
  routing.expert_ids = choose_experts(pattern, tokens, topk, experts, random);
  routing.weights = draw_weights(tokens, topk, random);
  sort_by_expert(routing, experts);
  return routing;
}

}  // namespace moegemm::cli
