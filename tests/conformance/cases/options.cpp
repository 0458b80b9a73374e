#include <utility>

#include "conformance/cases/cases.h"

namespace moegemm::testing {
namespace {

constexpr Permutation kBoth[] = {Permutation::kX, Permutation::kY};

/// 120 rows (a multiple of every topk up to 6 and of 8 and 10) on uneven experts, with 13 past
/// them.
ProblemCase permuted(std::string name, Permutation permutation, std::int64_t topk) {
  ProblemCase c;
  c.name = std::move(name) + "_" + to_string(permutation);
  c.m_sizes = {0, 40, 1, 50, 0, 16};
  c.rows = 120 / topk * topk;
  c.topk = topk;
  c.permutation = permutation;
  return c;
}

void add_topk_cases(std::vector<ProblemCase>& cases) {
  for (std::int64_t topk = 1; topk <= 10; ++topk) {
    for (const Permutation permutation : kBoth) {
      cases.push_back(permuted("Topk" + std::to_string(topk), permutation, topk));
    }
    ProblemCase multiply =
        permuted("Topk" + std::to_string(topk) + "Multiply", Permutation::kY, topk);
    multiply.multiply = true;
    multiply.weights_in_fp32 = topk % 2 == 1;
    cases.push_back(multiply);
  }
}

/// dY as the layer has it, which each of a token's rows reads.
void add_dy_per_token_cases(std::vector<ProblemCase>& cases) {
  for (const std::int64_t topk : {1, 2, 3, 4, 8}) {
    ProblemCase c = permuted("DyPerToken" + std::to_string(topk), Permutation::kY, topk);
    c.dy_per_token = true;
    c.multiply = topk == 2;
    c.bad_indices = {-1, c.rows, std::int64_t{1} << 30};
    cases.push_back(c);
  }
  ProblemCase tokens = permuted("DyPerTokenSeveralTiles", Permutation::kY, 4);
  tokens.dy_per_token = true;
  tokens.m_sizes = {130, 0, 300, 7, 65};
  tokens.rows = 520;
  tokens.n = 264;
  tokens.k = 136;
  cases.push_back(tokens);
  tokens.name = "DyPerTokenOddShapeStrided";
  tokens.n = 67;
  tokens.k = 45;
  tokens.dy_padding = 3;
  tokens.index_dtype = DType::kInt64;
  cases.push_back(tokens);
}

void add_shape_cases(std::vector<ProblemCase>& cases) {
  for (const Permutation permutation : kBoth) {
    ProblemCase wide = permuted("SeveralTiles", permutation, 2);
    wide.m_sizes = {130, 0, 300, 7, 65};
    wide.rows = 520;
    wide.n = 264;
    wide.k = 136;
    cases.push_back(wide);

    ProblemCase one_row = permuted("OneRow", permutation, 1);
    one_row.m_sizes = {0, 0, 1, 0};
    one_row.rows = 1;
    cases.push_back(one_row);

    ProblemCase odd_shape = permuted("OddShape", permutation, 3);
    odd_shape.n = 37;
    odd_shape.k = 53;
    cases.push_back(odd_shape);
  }
}

void add_multiply_cases(std::vector<ProblemCase>& cases) {
  for (const bool fp32_output : {false, true}) {
    const std::string output = fp32_output ? "Fp32Output" : "SameOutput";
    for (const bool fp32_weights : {false, true}) {
      ProblemCase c = permuted("Multiply" + output + (fp32_weights ? "Fp32Weights" : "SameWeights"),
                               Permutation::kY, 4);
      c.multiply = true;
      c.weights_in_fp32 = fp32_weights;
      c.output_in_fp32 = fp32_output;
      c.m_sizes = {70, 0, 200, 9, 33};
      c.rows = 324;
      c.n = 104;
      c.k = 200;
      cases.push_back(c);
    }
  }
}

/// In fp32, and added to what is there.
void add_output_cases(std::vector<ProblemCase>& cases) {
  for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
    ProblemCase fp32 = permuted("Fp32Output", permutation, 2);
    fp32.output_in_fp32 = true;
    cases.push_back(fp32);
    fp32.name = std::string("Fp32OutputOddShape_") + to_string(permutation);
    fp32.n = 67;
    fp32.k = 45;
    cases.push_back(fp32);

    ProblemCase accumulate = permuted("Accumulate", permutation, 2);
    accumulate.accumulate = true;
    cases.push_back(accumulate);
    accumulate.name = std::string("AccumulateOddShape_") + to_string(permutation);
    accumulate.n = 67;
    accumulate.k = 45;
    cases.push_back(accumulate);
    accumulate.name = std::string("AccumulateSeveralTiles_") + to_string(permutation);
    accumulate.m_sizes = {0, 300, 0, 70, 1};
    accumulate.rows = 372;
    accumulate.n = 264;
    accumulate.k = 136;
    cases.push_back(accumulate);
  }
  ProblemCase scaled_sum = permuted("AccumulateMultiply", Permutation::kY, 2);
  scaled_sum.accumulate = true;
  scaled_sum.multiply = true;
  cases.push_back(scaled_sum);
}

void add_index_cases(std::vector<ProblemCase>& cases) {
  for (const DType sizes : {DType::kInt32, DType::kInt64}) {
    for (const DType indices : {DType::kInt32, DType::kInt64}) {
      for (const Permutation permutation : kBoth) {
        ProblemCase c =
            permuted(std::string("Sizes_") + to_string(sizes) + "_Indices_" + to_string(indices),
                     permutation, 5);
        c.sizes_dtype = sizes;
        c.index_dtype = indices;
        c.multiply = permutation == Permutation::kY;
        cases.push_back(c);
      }
    }
  }
}

}  // namespace

std::vector<ProblemCase> option_cases() {
  std::vector<ProblemCase> cases;
  add_topk_cases(cases);
  add_dy_per_token_cases(cases);
  add_shape_cases(cases);
  add_multiply_cases(cases);
  add_output_cases(cases);
  add_index_cases(cases);
  return cases;
}

std::vector<ProblemCase> stride_cases() {
  std::vector<ProblemCase> cases;
  const auto add = [&](const std::string& name, std::int64_t padding, bool x, bool w, bool dy,
                       bool out) {
    for (const Permutation permutation : {Permutation::kNone, Permutation::kX, Permutation::kY}) {
      ProblemCase c = permuted(name, permutation, 2);
      c.m_sizes = {40, 0, 1, 50, 16};  // 13 rows of the 120 lie past the segments
      c.x_padding = x ? padding : 0;
      c.w_padding = w ? padding : 0;
      c.dy_padding = dy ? padding : 0;
      c.out_padding = out ? padding : 0;
      cases.push_back(c);
    }
  };
  add("StridedX", 16, true, false, false, false);
  add("StridedW", 24, false, true, false, false);
  add("StridedDy", 8, false, false, true, false);
  add("StridedOutput", 16, false, false, false, true);
  add("StridedAll", 8, true, true, true, true);
  add("StridedAllUnaligned", 3, true, true, true, true);
  add("WideStrides", 1000, true, false, true, true);

  for (const std::int64_t offset : {1, 2, 4, 8}) {
    ProblemCase c = permuted("BaseOffset" + std::to_string(offset), Permutation::kX, 2);
    c.base_offset = offset;
    cases.push_back(c);
    ProblemCase odd = permuted("BaseOffsetOddShape" + std::to_string(offset), Permutation::kY, 2);
    odd.base_offset = offset;
    odd.n = 33;
    odd.k = 41;
    cases.push_back(odd);
  }
  for (const Permutation permutation : kBoth) {
    ProblemCase c = permuted("StridedAccumulate", permutation, 2);
    c.accumulate = true;
    c.out_padding = 8;
    c.x_padding = 8;
    c.dy_padding = 16;
    cases.push_back(c);
  }
  ProblemCase fp32 = permuted("StridedFp32Output", Permutation::kY, 2);
  fp32.output_in_fp32 = true;
  fp32.out_padding = 5;
  fp32.multiply = true;
  cases.push_back(fp32);
  return cases;
}

}  // namespace moegemm::testing
