#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "conformance/cases/cases.h"

namespace moegemm::testing {
namespace {

using Sizes = std::vector<std::int64_t>;

std::int64_t sum(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

ProblemCase with_sizes(std::string name, Sizes sizes, std::int64_t n = 48, std::int64_t k = 64) {
  ProblemCase c;
  c.name = std::move(name);
  c.rows = sum(sizes);
  c.m_sizes = std::move(sizes);
  c.n = n;
  c.k = k;
  return c;
}

/// Sizes first, first + 1, ..., last, in an order that puts small beside large.
Sizes every_size(std::int64_t first, std::int64_t last) {
  Sizes sizes;
  for (std::int64_t low = first, high = last; low <= high; ++low, --high) {
    sizes.push_back(low);
    if (high > low) sizes.push_back(high);
  }
  return sizes;
}

}  // namespace

std::vector<ProblemCase> zero_size_cases() {
  std::vector<ProblemCase> cases;
  for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
    const std::string suffix = std::string("_") + to_string(permutation);
    ProblemCase no_rows = with_sizes("NoRows" + suffix, {0, 0, 0});
    no_rows.permutation = permutation;
    cases.push_back(no_rows);

    ProblemCase no_tokens = with_sizes("NoTokensTopk4" + suffix, {0});
    no_tokens.permutation = permutation;
    no_tokens.topk = 4;
    no_tokens.multiply = permutation == Permutation::kY;
    cases.push_back(no_tokens);

    ProblemCase all_empty = with_sizes("RowsButEveryExpertEmpty" + suffix, {0, 0, 0, 0, 0});
    all_empty.permutation = permutation;
    all_empty.rows = 20;
    all_empty.topk = 2;
    cases.push_back(all_empty);
  }
  ProblemCase sizes_without_rows = with_sizes("SizesButNoRows", {3, 5});
  sizes_without_rows.rows = 0;
  cases.push_back(sizes_without_rows);

  ProblemCase accumulate = with_sizes("AccumulateNothing", {0, 0, 0});
  accumulate.accumulate = true;
  cases.push_back(accumulate);
  return cases;
}

std::vector<ProblemCase> segment_cases() {
  std::vector<ProblemCase> cases = {
      with_sizes("OneExpertOneRow", {1}),
      with_sizes("OneExpert", {77}),
      with_sizes("EmptyExpertsFirst", {0, 0, 0, 9, 4}),
      with_sizes("EmptyExpertsLast", {9, 4, 0, 0, 0}),
      with_sizes("EmptyExpertsInTheMiddle", {5, 0, 0, 17, 0, 3}),
      with_sizes("EmptyExpertsEverywhere", {0, 13, 0, 0, 1, 0, 40, 0}),
      with_sizes("AllRowsOnTheFirstExpert", {150, 0, 0, 0}),
      with_sizes("AllRowsOnTheLastExpert", {0, 0, 0, 150}),
      with_sizes("AllRowsOnAMiddleExpert", {0, 150, 0}),
      with_sizes("OneRowEach", Sizes(67, 1)),
      with_sizes("OneRowOfManyExperts", {0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0}),
      with_sizes("Uneven", {1, 200, 3, 0, 64, 31, 129, 7}),
      with_sizes("HotExpertAmongMany", {2, 1, 0, 3, 333, 1, 1, 0, 2, 4}),
  };
  // A step of 20 keeps each case at a few thousand rows; together they take every tail length of
  // any tile up to 300 rows, forward and dX along rows, dW along the contraction.
  for (std::int64_t first = 1; first < 300; first += 20) {
    const std::int64_t last = first + 19;
    cases.push_back(with_sizes("Segments" + std::to_string(first) + "To" + std::to_string(last),
                               every_size(first, last), 40, 32));
  }
  cases.push_back(with_sizes("SegmentsAroundTiles",
                             {127, 128, 129, 159, 160, 161, 191, 192, 193, 255, 256, 257}, 136,
                             72));
  cases.push_back(with_sizes("SegmentsBeyondTiles", {383, 384, 385, 511, 512, 513, 700}, 136, 72));
  cases.push_back(with_sizes("TailsOfTheContraction", every_size(1, 65), 72, 136));
  // 1024 experts: the widest prefix sum that callers are promised.
  Sizes thousand(1024, 0);
  for (std::size_t e = 0; e < thousand.size(); ++e) thousand[e] = e % 3 == 0 ? 0 : (e * 7) % 4;
  cases.push_back(with_sizes("ThousandExperts", thousand, 24, 16));
  Sizes sparse(1024, 0);
  sparse[0] = 3;
  sparse[511] = 1;
  sparse[1023] = 9;
  cases.push_back(with_sizes("ThousandExpertsMostlyEmpty", sparse, 24, 16));
  Sizes odd_count(513, 1);
  cases.push_back(with_sizes("FiveHundredThirteenExperts", odd_count, 16, 24));
  return cases;
}

std::vector<ProblemCase> shape_cases() {
  std::vector<ProblemCase> cases;
  const Sizes sizes = {9, 0, 17, 1, 6};
  for (const std::int64_t s : {1,   2,   3,   4,   5,   7,   8,   9,   15,  16,  17,  24,  31,
                               32,  33,  40,  48,  63,  64,  65,  72,  96,  100, 127, 128, 129,
                               160, 192, 200, 255, 256, 257, 264, 320, 384, 448, 512, 576}) {
    cases.push_back(with_sizes("N" + std::to_string(s) + "K72", sizes, s, 72));
    cases.push_back(with_sizes("N72K" + std::to_string(s), sizes, 72, s));
    if (s <= 136) cases.push_back(with_sizes("NK" + std::to_string(s), sizes, s, s));
  }
  const std::pair<std::int64_t, std::int64_t> large[] = {{1000, 64},  {64, 1000}, {1024, 200},
                                                         {200, 1024}, {2048, 40}, {40, 2048},
                                                         {7, 4099},   {4099, 7},  {520, 520}};
  for (const auto& [n, k] : large) {
    cases.push_back(
        with_sizes("N" + std::to_string(n) + "K" + std::to_string(k), {5, 0, 18, 1}, n, k));
  }
  cases.push_back(with_sizes("SeveralTilesEachWay", {300, 0, 5, 130}, 392, 264));
  return cases;
}

std::vector<ProblemCase> all_cases() {
  std::vector<ProblemCase> all;
  for (auto* subject :
       {zero_size_cases, segment_cases, shape_cases, option_cases, epilogue_cases, low_rank_cases,
        stride_cases, capacity_cases, placement_cases, hazard_cases, quantised_cases}) {
    std::ranges::move(subject(), std::back_inserter(all));
  }
  return all;
}

}  // namespace moegemm::testing
