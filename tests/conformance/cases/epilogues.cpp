#include <utility>

#include "conformance/cases/cases.h"

namespace moegemm::testing {
namespace {

using Function = ActivationFunction;
using Layout = GateLayout;

constexpr Activation kGptOss = {Function::kSilu, Layout::kInterleaved, 1.702f, 7.0f, 1.0f};

/// 120 rows on uneven experts, with 13 past them; both products of a first GEMM: forward gathers
/// with permute_x, dX with permute_y.
ProblemCase activated(std::string name, const Activation& activation, Permutation permutation) {
  ProblemCase c;
  c.name = std::move(name) + "_" + to_string(permutation);
  c.m_sizes = {0, 40, 1, 50, 0, 16};
  c.rows = 120;
  c.n = 144;
  c.k = 176;
  c.topk = permutation == Permutation::kNone ? 1 : 4;
  c.permutation = permutation;
  c.dy_per_token = permutation == Permutation::kY;
  c.activation = activation;
  c.product_scale = 0.5f;
  return c;
}

void add_activations(std::vector<ProblemCase>& cases) {
  for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
    for (const auto& function : kActivationFunctions) {
      for (const auto& layout : kGateLayouts) {
        const std::string name = std::string("Activated_") + function.name + "_" + layout.name;
        ProblemCase c =
            activated(name, {.function = function.value, .layout = layout.value}, permutation);
        c.bias = function.value == ActivationFunction::kSilu;
        cases.push_back(c);
      }
    }
    ProblemCase gpt_oss = activated("GptOss", kGptOss, permutation);
    gpt_oss.bias = true;
    gpt_oss.product_scale = 1.0f;
    cases.push_back(gpt_oss);
  }
}

/// What surrounds an activation: shapes, hazards and strides, for each way a gate can lie.
void add_activation_edges(std::vector<ProblemCase>& cases) {
  for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
    for (const Layout layout : {Layout::kNone, Layout::kConcatenated, Layout::kInterleaved}) {
      const auto add = [&](const std::string& name, auto&& change) {
        ProblemCase c =
            activated("Activated" + name + "_" + to_string(layout),
                      {.layout = layout, .limit = 3.0f, .up_offset = 0.5f}, permutation);
        c.bias = true;
        change(c);
        cases.push_back(c);
      };
      add("SeveralTiles", [](ProblemCase& c) {
        c.m_sizes = {130, 0, 300, 7, 65};
        c.rows = 520;
        c.n = 400;
        c.k = 528;
        c.product_scale = 0.25f;
      });
      add("HalvesOfWholeSlabs", [](ProblemCase& c) { c.n = c.k = 256; });
      add("TwoColumns", [](ProblemCase& c) { c.n = c.k = 2; });
      add("SmallHalves", [](ProblemCase& c) { c.n = c.k = 16; });
      add("HalvesOf24", [](ProblemCase& c) { c.n = c.k = 48; });
      add("Unaligned", [](ProblemCase& c) {
        c.n = 74;
        c.k = 58;
      });
      add("Strided",
          [](ProblemCase& c) { c.x_padding = c.w_padding = c.dy_padding = c.out_padding = 8; });
      add("BaseOffset", [](ProblemCase& c) { c.base_offset = 1; });
      add("Fp32Output", [](ProblemCase& c) { c.output_in_fp32 = true; });
      add("NoRows", [](ProblemCase& c) {
        c.m_sizes = {0, 0, 0};
        c.rows = 0;
      });
      add("NothingRouted", [](ProblemCase& c) { c.m_sizes = {0, 0, 0}; });
      add("SizesExceedRows", [](ProblemCase& c) { c.m_sizes = {30, 100, 7}; });
      add("NegativeSizes", [](ProblemCase& c) { c.m_sizes = {-3, 30, -9, 7}; });
      add("BadTail", [](ProblemCase& c) { c.bad_tail = c.topk == 1; });
      add("BadRows", [](ProblemCase& c) {
        c.topk = 1;
        c.bad_rows = {0, 39, 40, 41, 90, 106};
      });
      add("BadExperts", [](ProblemCase& c) { c.bad_experts = {0, 2, 4}; });
      add("ManyExperts", [](ProblemCase& c) {
        c.m_sizes.assign(700, 1);
        c.rows = 720;
        c.n = c.k = 48;
      });
      if (permutation == Permutation::kNone) continue;
      add("IndicesOutOfRange", [](ProblemCase& c) {
        c.bad_indices = {-1, c.rows, std::int64_t{1} << 30, -1000, 121, 122};
        c.index_dtype = DType::kInt64;
      });
    }
  }
}

void add_biases(std::vector<ProblemCase>& cases) {
  for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
    const auto add = [&](const std::string& name, auto&& change) {
      ProblemCase c = activated("Bias" + name, {}, permutation);
      c.activation.reset();
      c.product_scale = 1.0f;
      c.dy_per_token = false;
      c.bias = true;
      change(c);
      cases.push_back(c);
    };
    add("Plain", [](ProblemCase&) {});
    add("Fp32Output", [](ProblemCase& c) { c.output_in_fp32 = true; });
    add("OddShape", [](ProblemCase& c) {
      c.n = 37;
      c.k = 53;
    });
    add("Strided", [](ProblemCase& c) { c.w_padding = c.out_padding = 8; });
    add("SeveralTiles", [](ProblemCase& c) {
      c.m_sizes = {130, 0, 300, 7, 65};
      c.rows = 520;
      c.n = 264;
      c.k = 392;
    });
    add("FewRows", [](ProblemCase& c) {
      c.m_sizes = {1, 2, 0, 3, 4};
      c.rows = 12;
    });
    add("BadTail", [](ProblemCase& c) { c.bad_tail = c.topk == 1; });
    if (permutation == Permutation::kNone) continue;
    add("IndicesOutOfRange", [](ProblemCase& c) {
      c.bad_indices = {-1, c.rows, std::int64_t{1} << 30, -1000};
    });
    if (permutation == Permutation::kX) continue;
    add("Multiply", [](ProblemCase& c) { c.multiply = true; });
    add("MultiplyIndicesOutOfRange", [](ProblemCase& c) {
      c.multiply = true;
      c.bad_indices = {-1, c.rows, std::int64_t{1} << 30, -1000};
    });
  }
}

}  // namespace

std::vector<ProblemCase> epilogue_cases() {
  std::vector<ProblemCase> cases;
  add_biases(cases);
  add_activations(cases);
  add_activation_edges(cases);
  return cases;
}

}  // namespace moegemm::testing
