#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moegemm/epilogue.h"
#include "moegemm/problem.h"

namespace moegemm::testing {

/// A call of `activate` and of `activate_backward`.
struct ActivationCase {
  std::string name;
  Activation activation = {};
  std::vector<std::int64_t> m_sizes = {20, 0, 33, 1, 6};
  std::vector<std::int64_t> starts = {};  ///< none: segments follow one another
  Tails tails = Tails::kZero;
  std::int64_t expected_rows = -1;
  std::int64_t rows = 72;  ///< 12 of them past the segments
  std::int64_t cols = 64;  ///< activated
  std::int64_t hidden = 40;
  std::int64_t topk = 2;
  std::int64_t slots = -1;  ///< T * topk; -1: as many as rows
  std::int64_t padding = 0;
  float scale = 4;  ///< of the first product's elements
  bool bias = false;
  bool down_bias = false;
  bool weighted = true;
  bool with_weighted_act = true;
  bool with_d_weights = true;
  bool in_place = false;
  bool fp32_output = false;
  bool fp32_d_act = false;
  bool nan_tail = false;
  bool by_row = false;  ///< rows have weights in expert order, and no indices
  std::vector<std::int64_t> bad_indices = {};
  DType index_dtype = DType::kInt32;
};

std::vector<ActivationCase> activation_cases();

}  // namespace moegemm::testing
