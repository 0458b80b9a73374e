#include "conformance/passes/activation_cases.h"

namespace moegemm::testing {
namespace {

constexpr Activation kGptOss = {ActivationFunction::kSilu, GateLayout::kInterleaved, 1.702f, 7.0f,
                                1.0f};

/// Segments with gaps, and tails that are left alone.
void add_placed_cases(std::vector<ActivationCase>& cases) {
  for (const Tails tails : {Tails::kZero, Tails::kUndefined}) {
    const std::string suffix = tails == Tails::kZero ? "" : "Undefined";
    ActivationCase c = {.name = "Gaps" + suffix,
                        .starts = {50, 3, 8, 71, 0},
                        .tails = tails,
                        .bias = true,
                        .down_bias = true,
                        .nan_tail = true};
    cases.push_back(c);
    c.name = "GapsUnaligned" + suffix;
    c.cols = 37;
    c.padding = 3;
    cases.push_back(c);
    c = {.name = "ManyGaps" + suffix,
         .activation = kGptOss,
         .m_sizes = std::vector<std::int64_t>(300, 3),
         .tails = tails,
         .rows = 1500,
         .cols = 264,
         .topk = 1,
         .bias = true,
         .nan_tail = true,
         .by_row = true};
    for (int e = 0; e < 300; ++e) c.starts.push_back(5 * (299 - e));
    cases.push_back(c);
    c = {.name = "FewerRowsExpected" + suffix,
         .tails = tails,
         .expected_rows = 10,
         .rows = 3000,
         .cols = 768,
         .topk = 8,
         .nan_tail = true};
    cases.push_back(c);
  }
}

void add_row_counts(std::vector<ActivationCase>& cases) {
  cases.insert(cases.end(),
               {
                   {.name = "NoRows", .m_sizes = {0, 0}, .rows = 0},
                   {.name = "NoRowsOfSomeSlots", .m_sizes = {0, 0}, .rows = 0, .slots = 10},
                   {.name = "FewRowsOfManySlots", .slots = 400, .down_bias = true},
                   {.name = "MoreRowsThanSlots", .slots = 20},
               });
}

/// Biases, weights, and which results are wanted.
void add_arguments(std::vector<ActivationCase>& cases) {
  cases.insert(
      cases.end(),
      {
          {.name = "Plain"},
          {.name = "GptOss", .activation = kGptOss, .scale = 12, .bias = true, .down_bias = true},
          {.name = "GptOssUnaligned",
           .activation = kGptOss,
           .cols = 37,
           .hidden = 13,
           .padding = 3,
           .scale = 12,
           .bias = true,
           .down_bias = true},
          {.name = "ClampedConcatenated",
           .activation = {.alpha = 1.0f, .limit = 2.0f, .up_offset = 0.0f},
           .scale = 8},
          {.name = "DownBiasAlone", .down_bias = true},
          {.name = "Unweighted", .weighted = false},
          {.name = "InputGradientAlone",
           .weighted = false,
           .with_weighted_act = false,
           .with_d_weights = false},
          {.name = "WithoutWeightGradient", .with_d_weights = false},
          {.name = "WithoutWeightedActivation", .with_weighted_act = false},
          {.name = "InPlace", .in_place = true},
          {.name = "Fp32Output", .fp32_output = true},
          {.name = "GptOssInPlace",
           .activation = kGptOss,
           .cols = 648,
           .bias = true,
           .in_place = true},
          {.name = "GptOssFp32Output",
           .activation = kGptOss,
           .cols = 648,
           .bias = true,
           .fp32_output = true},
      });
}

void add_forms_of_tensors(std::vector<ActivationCase>& cases) {
  cases.insert(cases.end(),
               {
                   {.name = "Fp32Gradient", .fp32_d_act = true},
                   {.name = "Int64Indices", .index_dtype = DType::kInt64},
                   {.name = "Strided", .padding = 8, .bias = true},
                   {.name = "StridedUnaligned", .cols = 37, .padding = 3, .bias = true},
               });
}

void add_impossible_routing(std::vector<ActivationCase>& cases) {
  cases.insert(cases.end(),
               {
                   {.name = "NanPastTheSegments", .bias = true, .nan_tail = true},
                   {.name = "SizesExceedRows", .m_sizes = {30, 100, 7}, .bias = true},
                   {.name = "NegativeSizes", .m_sizes = {-3, 30, -9, 7}, .bias = true},
                   {.name = "IndicesOutOfRange", .bad_indices = {-1, 72, 1000, -100, 2147483647}},
                   {.name = "Indices64BitTruncate",
                    .bad_indices = {std::int64_t{1} << 32, (std::int64_t{1} << 32) + 5},
                    .index_dtype = DType::kInt64},
               });
}

void add_weights_of_rows(std::vector<ActivationCase>& cases) {
  cases.insert(
      cases.end(),
      {
          {.name = "WeightsOfRows", .topk = 1, .bias = true, .down_bias = true, .by_row = true},
          {.name = "WeightsOfRowsUnaligned",
           .cols = 37,
           .hidden = 13,
           .topk = 1,
           .padding = 3,
           .down_bias = true,
           .nan_tail = true,
           .by_row = true},
          {.name = "WeightsOfRowsGptOss",
           .activation = kGptOss,
           .m_sizes = {2000, 0, 1000},
           .rows = 3072,
           .cols = 648,
           .topk = 1,
           .bias = true,
           .in_place = true,
           .by_row = true},
      });
}

void add_large_cases(std::vector<ActivationCase>& cases) {
  cases.insert(
      cases.end(),
      {
          {.name = "Wide", .cols = 3000, .bias = true},
          {.name = "Many", .m_sizes = {2000, 0, 1000}, .rows = 3072, .cols = 72, .topk = 8},
          {.name = "ManyGptOss",
           .activation = kGptOss,
           .m_sizes = {2000, 0, 1000},
           .rows = 3072,
           .cols = 72,
           .topk = 8,
           .bias = true},
          {.name = "ManyExperts",
           .m_sizes = std::vector<std::int64_t>(700, 1),
           .rows = 720,
           .bias = true},
      });
}

void add_functions(std::vector<ActivationCase>& cases) {
  for (const auto& function : kActivationFunctions) {
    for (const auto& layout : kGateLayouts) {
      ActivationCase c;
      c.name = std::string(function.name) + "_" + layout.name;
      c.activation = {.function = function.value, .layout = layout.value};
      cases.push_back(c);
      c.name += "_unaligned";
      c.cols = 27;
      c.bias = true;
      cases.push_back(c);
    }
  }
}

/// Strips of 256 columns, whole and not.
void add_widths(std::vector<ActivationCase>& cases) {
  for (const std::int64_t cols : {1, 2, 7, 8, 9, 31, 33, 128, 136, 264, 392, 520, 768}) {
    cases.push_back({.name = "Cols" + std::to_string(cols), .cols = cols});
    cases.push_back({.name = "GptOssCols" + std::to_string(cols),
                     .activation = kGptOss,
                     .cols = cols,
                     .bias = true,
                     .down_bias = true});
  }
}

}  // namespace

std::vector<ActivationCase> activation_cases() {
  std::vector<ActivationCase> cases;
  add_row_counts(cases);
  add_arguments(cases);
  add_forms_of_tensors(cases);
  add_impossible_routing(cases);
  add_weights_of_rows(cases);
  add_large_cases(cases);
  add_placed_cases(cases);
  add_functions(cases);
  add_widths(cases);
  return cases;
}

}  // namespace moegemm::testing
