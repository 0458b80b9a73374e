#include <string>

#include "conformance/cases/cases.h"

namespace moegemm::testing {
namespace {

/// 120 rows on uneven experts, with 13 past them, and a rank that fills part of a block of depth.
ProblemCase low_rank(const std::string& name, Permutation permutation) {
  ProblemCase c;
  c.name = "LowRank" + name + "_" + to_string(permutation);
  c.m_sizes = {0, 40, 1, 50, 0, 16};
  c.rows = 120;
  c.n = 144;
  c.k = 176;
  c.topk = permutation == Permutation::kNone ? 1 : 4;
  c.permutation = permutation;
  c.low_rank = 16;
  return c;
}

/// Ranks below, at and past the blocks of depth of every kernel, aligned to 16 bytes and not.
void add_ranks(std::vector<ProblemCase>& cases) {
  for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
    for (const std::int64_t rank : {1, 5, 8, 16, 24, 32, 64, 72, 128, 136, 200, 256}) {
      ProblemCase c = low_rank(std::to_string(rank), permutation);
      c.low_rank = rank;
      cases.push_back(c);
    }
  }
}

void add_surroundings(std::vector<ProblemCase>& cases) {
  for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
    const auto add = [&](const std::string& name, auto&& change) {
      ProblemCase c = low_rank(name, permutation);
      change(c);
      cases.push_back(c);
    };
    add("SeveralTiles", [](ProblemCase& c) {
      c.m_sizes = {130, 0, 300, 7, 65};
      c.rows = 520;
      c.n = 264;
      c.k = 392;
      c.low_rank = 40;
    });
    add("ManyRows", [](ProblemCase& c) {
      c.m_sizes = {700, 3, 321};
      c.rows = 1024;
      c.n = c.k = 128;
    });
    add("OneDepthBlock", [](ProblemCase& c) { c.n = c.k = 64; });
    add("ShorterThanTheRank", [](ProblemCase& c) {
      c.n = c.k = 8;
      c.low_rank = 72;
    });
    add("OddShape", [](ProblemCase& c) {
      c.n = 37;
      c.k = 53;
      c.low_rank = 13;
    });
    add("FewRows", [](ProblemCase& c) {
      c.m_sizes = {1, 2, 0, 3, 4};
      c.rows = 12;
    });
    add("Fp32Output", [](ProblemCase& c) { c.output_in_fp32 = true; });
    add("Bias", [](ProblemCase& c) { c.bias = true; });
    add("Strided",
        [](ProblemCase& c) { c.x_padding = c.w_padding = c.dy_padding = c.out_padding = 8; });
    add("BaseOffset", [](ProblemCase& c) { c.base_offset = 1; });
    add("NoRows", [](ProblemCase& c) {
      c.m_sizes = {0, 0, 0};
      c.rows = 0;
    });
    add("NothingRouted", [](ProblemCase& c) { c.m_sizes = {0, 0, 0}; });
    add("SizesExceedRows", [](ProblemCase& c) { c.m_sizes = {30, 100, 7}; });
    add("BadTail", [](ProblemCase& c) { c.bad_tail = c.topk == 1; });
    add("BadRows", [](ProblemCase& c) {
      c.topk = 1;
      c.bad_rows = {0, 39, 40, 41, 90, 106};
    });
    if (permutation == Permutation::kNone) continue;
    add("IndicesOutOfRange", [](ProblemCase& c) {
      c.bad_indices = {-1, c.rows, std::int64_t{1} << 30, -1000};
    });
    add("PerToken", [](ProblemCase& c) { c.dy_per_token = c.permutation == Permutation::kY; });
    if (permutation == Permutation::kX) continue;
    add("Multiply", [](ProblemCase& c) { c.multiply = true; });
  }
}

void add_activated(std::vector<ProblemCase>& cases) {
  for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
    for (const auto& layout : kGateLayouts) {
      ProblemCase c = low_rank(std::string("Activated_") + layout.name, permutation);
      c.dy_per_token = permutation == Permutation::kY;
      c.activation = Activation{.layout = layout.value, .limit = 3.0f, .up_offset = 0.5f};
      c.bias = true;
      c.product_scale = 0.5f;
      cases.push_back(c);
      c.name = "LowRankSeveralTiles" + c.name;
      c.m_sizes = {130, 0, 300, 7, 65};
      c.rows = 520;
      c.n = 400;
      c.k = 528;
      c.low_rank = 72;
      c.product_scale = 0.25f;
      cases.push_back(c);
    }
  }
}

}  // namespace

std::vector<ProblemCase> low_rank_cases() {
  std::vector<ProblemCase> cases;
  add_ranks(cases);
  add_surroundings(cases);
  add_activated(cases);
  return cases;
}

}  // namespace moegemm::testing
