#include <string>
#include <utility>

#include "conformance/cases/cases.h"

namespace moegemm::testing {
namespace {

/// Segments with gaps between them, NaN in every gap.
ProblemCase gapped(std::string name, Permutation permutation) {
  ProblemCase c;
  c.name = std::move(name);
  c.permutation = permutation;
  c.topk = permutation == Permutation::kNone ? 1 : 2;
  c.m_sizes = {20, 0, 33, 7, 0, 40};
  c.starts = {0, 24, 32, 72, 80, 96};
  c.rows = 160;
  c.bad_tail = true;
  if (c.permuted()) c.tail_index = -1;
  return c;
}

void add_forms(std::vector<ProblemCase>& cases) {
  constexpr std::pair<Permutation, const char*> kPermutations[] = {
      {Permutation::kNone, ""}, {Permutation::kX, "_permute_x"}, {Permutation::kY, "_permute_y"}};
  for (const auto& [permutation, suffix] : kPermutations) {
    for (const Tails tails : {Tails::kZero, Tails::kUndefined}) {
      const std::string end = std::string(tails == Tails::kZero ? "" : "_undefined") + suffix;
      const auto add = [&](const char* name) {
        ProblemCase& c = cases.emplace_back(gapped(name + end, permutation));
        c.tails = tails;
        return &c;
      };
      add("SegmentsWithGaps");
      add("SegmentsInAnyOrder")->starts = {100, 3, 60, 130, 0, 17};
      ProblemCase* masked = add("MaskedRows");
      masked->m_sizes = {5, 32, 0, 1, 31};
      masked->starts = {0, 32, 64, 96, 128};
      ProblemCase* wide = add("StartsOf64Bits");
      wide->sizes_dtype = DType::kInt64;
      wide->index_dtype = DType::kInt64;
      ProblemCase* ends = add("CumulativeEnds");
      ends->starts.clear();
      ends->ends = true;
      ends->m_sizes = {20, 20, 53, 60, 60, 100};
      ProblemCase* packed = add("SizesWithATail");
      packed->starts.clear();
      ProblemCase* expected = add("FewerRowsExpected");
      expected->starts.clear();
      expected->rows = 2048;
      expected->expected_rows = 100;
    }
  }
}

}  // namespace

std::vector<ProblemCase> placement_cases() {
  std::vector<ProblemCase> cases;
  add_forms(cases);
  const auto add = [&](const char* name) {
    return &cases.emplace_back(gapped(name, Permutation::kNone));
  };
  ProblemCase* outside = add("StartsAndSizesOutsideTheRows");
  outside->m_sizes = {20, -5, 1000, std::int64_t{1} << 40, 30};
  outside->starts = {-8, 40, 150, 500, -100};
  outside->sizes_dtype = DType::kInt64;
  ProblemCase* ends = add("EndsThatGoBack");
  ends->starts.clear();
  ends->ends = true;
  ends->m_sizes = {30, 20, -3};
  ProblemCase* activated = add("GapsWithBiasAndActivation");
  activated->bias = true;
  activated->activation = Activation{};
  activated->product_scale = 0.25f;
  ProblemCase* accumulated = add("GapsAccumulated");
  accumulated->accumulate = true;
  ProblemCase* many = add("ManyPlacedExperts");
  many->m_sizes.clear();
  many->starts.clear();
  for (int e = 0; e < 700; ++e) {
    many->m_sizes.push_back(e % 5);
    many->starts.push_back(e * 8 + e % 3);
  }
  many->rows = 700 * 8;
  ProblemCase* large = add("LargePlacedSegments");
  large->m_sizes = {300, 0, 517, 129};
  large->starts = {128, 1024, 512, 1100};
  large->rows = 1300;
  large->n = 264;
  large->k = 192;
  ProblemCase* unaligned = add("GapsOfOddWidths");
  unaligned->n = 37;
  unaligned->k = 51;
  return cases;
}

}  // namespace moegemm::testing
