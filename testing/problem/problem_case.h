#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "moegemm/problem.h"
#include "moegemm/quantization.h"
#include "moegemm/tensor.h"

namespace moegemm::testing {

/// One situation that every backend must get right, for each product and dtype. Plain data: what is
/// not listed here (values, permutation) follows from the name and the run's seed.
struct ProblemCase {
  std::string name;
  std::vector<std::int64_t> m_sizes;      ///< as passed, also when they make no sense
  std::vector<std::int64_t> starts = {};  ///< as passed; none: segments follow one another
  bool ends = false;                      ///< m_sizes are passed as where segments end
  Tails tails = Tails::kZero;
  std::int64_t expected_rows = -1;
  std::int64_t rows = 0;  ///< M = T * topk, or a capacity where `slots` is given
  std::int64_t n = 48;
  std::int64_t k = 64;
  std::int64_t topk = 1;
  Permutation permutation = Permutation::kNone;
  bool multiply = false;
  bool weights_in_fp32 = true;                 ///< router_weights in fp32, else in X's dtype
  bool output_in_fp32 = false;                 ///< else in X's dtype
  bool accumulate = false;                     ///< dW only; the output is fp32
  bool dy_per_token = false;                   ///< dX and dW with permute_y
  std::int64_t low_rank = 0;                   ///< forward and dX; 0: none
  bool bias = false;                           ///< forward and dX
  bool tf32 = false;                           ///< fp32 may be multiplied as TF32
  std::int64_t slots = -1;                     ///< T * topk; -1: as many as rows
  std::optional<Activation> activation = {};   ///< forward and dX in expert order
  float product_scale = 1;                     ///< of the elements of W, for activations
  std::string weights = {};                    ///< a text for parse_quantization; empty: plain
  ScaleType scale_type = ScaleType::kFloat32;  ///< of quantised weights
  bool extreme_scales = false;                 ///< any bits at all; beyond what the oracle bounds
  DType sizes_dtype = DType::kInt32;
  DType index_dtype = DType::kInt32;

  /// Elements between rows that belong to nobody: NaN in inputs, untouched in the output.
  std::int64_t x_padding = 0;
  std::int64_t w_padding = 0;
  std::int64_t dy_padding = 0;
  std::int64_t out_padding = 0;
  std::int64_t base_offset = 0;  ///< elements from the start of an allocation to its tensor

  std::vector<std::int64_t> bad_indices;        ///< replace as many entries of gather_indices
  std::int64_t repeated_indices = 0;            ///< so many positions take the index of another one
  std::optional<std::int64_t> tail_index = {};  ///< of every position past the segments
  std::vector<std::int64_t> bad_rows;  ///< positions whose input rows hold NaN or infinities
  bool bad_tail = false;               ///< as bad_rows, for every position past the segments
  bool bad_absent_rows = false;  ///< as bad_rows, for every position whose index is out of range
  std::vector<std::int64_t> bad_experts;  ///< whose W holds NaN
  bool bad_tail_weights = false;          ///< NaN in router_weights of rows past the segments

  std::int64_t experts() const { return static_cast<std::int64_t>(m_sizes.size()); }
  std::int64_t flat_rows() const { return slots < 0 ? rows : slots; }
  std::int64_t tokens() const { return flat_rows() / topk; }
  std::int64_t features(Op op) const { return op == Op::kForward ? n : k; }
  bool scatters(Op op) const {
    return (op == Op::kForward && permutation == Permutation::kY) ||
           (op == Op::kDx && permutation == Permutation::kX);
  }
  std::int64_t output_rows(Op op) const { return scatters(op) ? flat_rows() : rows; }
  bool quantised() const { return !weights.empty(); }
  bool permuted() const { return permutation != Permutation::kNone; }
  /// Multiply-adds of one product, at most.
  double work() const {
    return static_cast<double>(rows) * static_cast<double>(n) * static_cast<double>(k);
  }
};

std::string to_string(const ProblemCase& problem);

/// Whether the case asks `op` in `dtype` anything that it does not ask elsewhere.
bool applies(const ProblemCase& problem, Op op, DType dtype);

/// Rows of each segment by the rules: negative sizes count as 0, segments are clipped at M.
std::vector<std::int64_t> clipped_sizes(const std::vector<std::int64_t>& m_sizes,
                                        std::int64_t rows);

}  // namespace moegemm::testing
