#include <string>

#include "conformance/cases/cases.h"

namespace moegemm::testing {
namespace {

struct Format {
  const char* text;
  ScaleType scale_type;
  std::int64_t group;  ///< K is a multiple of it
  bool in_full;        ///< every case; else those in which blocks and scales matter
};
constexpr Format kFormats[] = {
    {"mxfp4", ScaleType::kE8m0, 32, true},           {"fp8/128x128", ScaleType::kFloat32, 8, true},
    {"int4/32", ScaleType::kBFloat16, 32, true},     {"nf4/64", ScaleType::kFloat32, 8, true},
    {"fp8/128x128", ScaleType::kE8m0, 8, false},     {"fp8/channel", ScaleType::kFloat32, 8, false},
    {"fp8/channel", ScaleType::kBFloat16, 8, false}, {"fp8/tensor", ScaleType::kFloat32, 8, false},
    {"int4/64", ScaleType::kFloat16, 64, false},     {"int4/128", ScaleType::kBFloat16, 128, false},
    {"nf4/256", ScaleType::kFloat32, 8, false},
};

std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::string name_of(const Format& format) {
  std::string name = std::string("Quantised_") + format.text + "_" + to_string(format.scale_type);
  for (char& c : name) c = c == '/' ? '_' : c;
  return name;
}

/// 120 rows on uneven experts, with 13 past them.
ProblemCase quantised(const Format& format, const std::string& name,
                      Permutation permutation = Permutation::kNone) {
  ProblemCase c;
  c.name = name_of(format) + "_" + name;
  c.m_sizes = {0, 40, 1, 50, 0, 16};
  c.rows = 120;
  c.n = 144;
  c.k = round_up(192, format.group);
  c.topk = permutation == Permutation::kNone ? 1 : 4;
  c.permutation = permutation;
  c.weights = format.text;
  c.scale_type = format.scale_type;
  return c;
}

void add_shapes(const Format& format, std::vector<ProblemCase>& cases) {
  const auto add = [&](const std::string& name, auto&& change) {
    ProblemCase c = quantised(format, name);
    change(c);
    cases.push_back(c);
  };
  const std::int64_t group = format.group;
  add("OddN", [](ProblemCase& c) { c.n = 77; });
  add("PartialBlocks", [=](ProblemCase& c) {
    c.n = 200;
    c.k = round_up(328, group);
  });
  add("Decoding", [=](ProblemCase& c) {
    c.m_sizes = {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2};
    c.rows = 12;
    c.n = 96;
    c.k = round_up(544, group);
  });
  add("FewRows", [=](ProblemCase& c) {  // in whole vectors: decoded values may stay in registers
    c.m_sizes = {0, 1, 2, 3, 4, 5};
    c.rows = 19;
    c.n = 212;
    c.k = round_up(320, group);
  });
  add("OneGroup", [=](ProblemCase& c) { c.k = group; });
  add("ManyExperts", [=](ProblemCase& c) {
    c.m_sizes.assign(1024, 0);
    for (int e = 0; e < 1024; e += 3) c.m_sizes[e] = 1 + e % 2;
    c.rows = 560;
    c.n = 24;
    c.k = round_up(32, group);
  });
  if (!format.in_full) return;
  add("FewRowsFolded", [](ProblemCase& c) {  // dX sums more weight rows than it adds at a time
    c.m_sizes = {1, 4, 0, 3, 2};
    c.rows = 11;
    c.n = 530;
    c.k = 192;
  });
  add("InOrder", [](ProblemCase&) {});
  add("OneRowOfW", [](ProblemCase& c) { c.n = 1; });
  add("SeveralTiles", [=](ProblemCase& c) {
    c.m_sizes = {130, 0, 300, 7, 65};
    c.rows = 520;
    c.n = 264;
    c.k = round_up(392, group);
  });
  add("ManyRows", [](ProblemCase& c) {
    c.m_sizes = {700, 3, 321};
    c.rows = 1024;
    c.n = 128;
    c.k = 128;
  });
  add("NoRows", [](ProblemCase& c) {
    c.m_sizes = {0, 0};
    c.rows = 0;
  });
  add("Unaligned", [](ProblemCase& c) { c.base_offset = 1; });
  if (group == 8) {  // what groups do not hold to whole vectors
    add("OddK", [](ProblemCase& c) {
      c.n = 130;
      c.k = 147;
    });
    add("OneColumn", [](ProblemCase& c) { c.k = 1; });
  }
}

void add_options(const Format& format, std::vector<ProblemCase>& cases) {
  for (const Permutation permutation : {Permutation::kX, Permutation::kY}) {
    const auto add = [&](const std::string& name, auto&& change) {
      ProblemCase c = quantised(format, name + "_" + to_string(permutation), permutation);
      change(c);
      cases.push_back(c);
    };
    add("Flat", [](ProblemCase&) {});
    add("BadIndices", [](ProblemCase& c) {
      c.bad_indices = {-1, 1000, 120};
      c.bad_absent_rows = true;
      c.bias = true;
    });
    add("LowRank", [](ProblemCase& c) { c.low_rank = 16; });
    add("ManyTiles", [](ProblemCase& c) {  // several for each multiprocessor
      c.m_sizes.clear();
      c.rows = 16;
      for (int e = 0; e < 140; ++e) {
        c.m_sizes.push_back(e % 70 == 9 ? 300 : (e % 7 == 0 ? 0 : 4 + e % 5 * 4));
        c.rows += c.m_sizes.back();
      }
      c.n = 384;
    });
  }
  ProblemCase scaled = quantised(format, "Scaled", Permutation::kY);
  scaled.multiply = true;
  cases.push_back(scaled);
  scaled.name += "PerToken";
  scaled.multiply = false;
  scaled.dy_per_token = true;
  cases.push_back(scaled);
  ProblemCase wide = quantised(format, "Float32Output");
  wide.output_in_fp32 = true;
  wide.bias = true;
  cases.push_back(wide);
  ProblemCase spoilt = quantised(format, "BadExperts");
  spoilt.bad_experts = {1};
  spoilt.bad_tail = true;
  cases.push_back(spoilt);
  ProblemCase placed = quantised(format, "Placed");
  placed.m_sizes = {20, 0, 33, 9};
  placed.starts = {64, 3, 0, 100};
  cases.push_back(placed);
  for (const GateLayout layout : {GateLayout::kConcatenated, GateLayout::kInterleaved}) {
    ProblemCase activated = quantised(format, std::string("Activated_") + to_string(layout));
    activated.bias = true;
    activated.activation = Activation{.layout = layout};
    activated.product_scale = 0.25f;
    cases.push_back(activated);
  }
}

}  // namespace

std::vector<ProblemCase> quantised_cases() {
  std::vector<ProblemCase> cases;
  for (const Format& format : kFormats) {
    add_shapes(format, cases);
    if (format.in_full) add_options(format, cases);
  }
  return cases;
}

}  // namespace moegemm::testing
