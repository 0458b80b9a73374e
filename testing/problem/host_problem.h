#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moegemm/problem.h"
#include "moegemm/tensor.h"
#include "testing/numerics/floats.h"
#include "testing/numerics/random.h"
#include "testing/problem/problem_case.h"
#include "testing/problem/quantised_weights.h"

namespace moegemm::testing {

/// A matrix as a backend gets it (bytes, with its row stride) and as the oracle reads it (dense
/// values). The allocation ends with the last row's last element.
struct HostMatrix {
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t stride = 0;  ///< elements
  std::int64_t offset = 0;  ///< elements before row 0
  std::vector<unsigned char> bytes;
  std::vector<float> values;  ///< [rows, cols]

  const float* row(std::int64_t r) const { return values.data() + r * cols; }
  std::int64_t position(std::int64_t r, std::int64_t c) const { return offset + r * stride + c; }
  void set(std::int64_t r, std::int64_t c, float value);
};

/// Every element of the allocation is NaN (all bits set) until it is set.
HostMatrix poisoned_matrix(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t padding,
                           std::int64_t offset);
HostMatrix random_matrix(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t padding,
                         std::int64_t offset, Random& random);

/// Everything about one call, on the host.
struct HostProblem {
  ProblemCase spec;
  Op op = Op::kForward;
  DType dtype = DType::kBFloat16;
  DType out_dtype = DType::kBFloat16;
  DType weights_dtype = DType::kFloat32;

  HostMatrix x;               ///< [T or M, K]; not for dX
  HostMatrix w;               ///< [E * N, K]; not for dW. Of quantised weights what they decode to
  QuantisedWeights packed_w;  ///< empty unless the case quantises its weights
  HostMatrix dy;              ///< [M or T, N]; not for forward
  HostMatrix bias;            ///< [E, features]; empty unless the case has one
  HostMatrix low_rows;        ///< [M, r]; empty unless the case has a low rank r
  HostMatrix low_weights;     ///< [E * N, r] of forward, [E * r, K] of dX
  HostMatrix out;             ///< as it is before the call: poison, or what is accumulated to
  std::vector<std::int64_t> gather_indices;  ///< [M], also when the call does not take them
  std::vector<float> router_weights;         ///< [T * topk], rounded to weights_dtype

  std::vector<std::int64_t> sizes;   ///< [E], clipped
  std::vector<std::int64_t> begins;  ///< [E + 1]: where segments start; the last is their sum
  std::vector<std::int64_t> owners;  ///< [M]: expert of each position, -1 outside the segments
  /// [T * topk]: the positions of the segments that name a flat row; several only where the case
  /// repeats indices.
  std::vector<std::vector<std::int64_t>> positions_of;

  bool index_valid(std::int64_t position) const {
    return gather_indices[position] >= 0 && gather_indices[position] < spec.flat_rows();
  }
  /// The row of X or dY that a position reads, or -1 for "a zero row".
  std::int64_t x_row(std::int64_t position) const;
  std::int64_t dy_row(std::int64_t position) const;
  /// What a position's product is multiplied by.
  double scale(std::int64_t position) const {
    return spec.multiply && index_valid(position) ? router_weights[gather_indices[position]] : 1.0;
  }
  bool scatters() const { return spec.scatters(op); }
};

HostProblem build_problem(const ProblemCase& spec, Op op, DType dtype, std::uint64_t seed);

/// Gives the same operands other sizes, indices and weights: what changes between two replays of a
/// captured graph.
void reroute(HostProblem& problem, const std::vector<std::int64_t>& m_sizes, std::uint64_t seed);

}  // namespace moegemm::testing
