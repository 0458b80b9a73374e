#pragma once

#include <cstdint>
#include <vector>

#include "moegemm/kinds.h"

namespace moegemm::cli {

/// How tokens choose experts.
enum class RoutingPattern {
  kUniform,   ///< every expert equally likely
  kZipf,      ///< the expert of rank i with probability ~ 1 / i, as trained routers drift to
  kBalanced,  ///< every expert the same number of rows, give or take one
};
inline constexpr Named<RoutingPattern> kRoutingPatterns[] = {
    {RoutingPattern::kUniform, "uniform"},
    {RoutingPattern::kZipf, "zipf"},
    {RoutingPattern::kBalanced, "balanced"},
};
const char* to_string(RoutingPattern pattern);

/// What a router hands to the layer, and the sorted order that follows from it: computed on the
/// host, plainly, as the oracle of `moegemm::route`.
struct TokenRouting {
  std::vector<std::int32_t> expert_ids;      ///< [T, topk], all different within a token
  std::vector<float> weights;                ///< [T, topk], positive, sum 1 per token
  std::vector<std::int32_t> m_sizes;         ///< [E]
  std::vector<std::int32_t> gather_indices;  ///< [M]: flat index of expert-ordered row r
  std::vector<std::int64_t> segment_begin;   ///< [E + 1]: first row of each expert
  std::vector<std::int32_t> expert_of_row;   ///< [M], by expert-ordered row
};

TokenRouting make_routing(RoutingPattern pattern, std::int64_t tokens, std::int64_t topk,
                          std::int64_t experts, std::uint64_t seed);

}  // namespace moegemm::cli
