#include "cpu/reference/products.h"

#include <algorithm>
#include <vector>

#include "cpu/element_type.h"
#include "cpu/reference/epilogue.h"
#include "cpu/routing_data.h"
#include "cpu/weight_decoding.h"

namespace moegemm::cpu::reference {
namespace {

/// Where the row at one expert-ordered position is read and written, and its factor.
struct Row {
  bool valid = true;  ///< false: its index is out of range. Reads as zeros, is not stored
  std::int64_t source = 0;
  std::int64_t destination = 0;
  double factor = 1;
};

Row find_row(const Problem& problem, const Operands& operands, std::int64_t position) {
  Row row{true, position, position, 1.0};
  if (problem.permutation == Permutation::kNone) return row;
  const std::int64_t flat = read_index(operands.gather_indices, problem.index_dtype, position);
  if (flat < 0 || flat >= problem.flat_rows()) {
    row.valid = false;
    return row;
  }
  if (problem.gathers()) row.source = flat / problem.gather_divisor();
  if (problem.scatters()) row.destination = flat;
  if (problem.multiply) {
    row.factor = read_float(operands.router_weights, problem.weights_dtype, flat);
  }
  return row;
}

SegmentList segments_of(const Problem& problem, const Operands& operands) {
  return cpu::segments_of(segments_view(problem, operands), problem.rows);
}

template <typename T>
std::vector<double> load_row(const void* matrix, std::int64_t row, std::int64_t stride,
                             std::int64_t cols) {
  const T* first = static_cast<const T*>(matrix) + row * stride;
  std::vector<double> values(cols);
  for (std::int64_t c = 0; c < cols; ++c) values[c] = to_float(first[c]);
  return values;
}

void store_row(const Problem& problem, const Operands& operands, std::int64_t row,
               const std::vector<double>& values, double factor) {
  const std::int64_t cols = static_cast<std::int64_t>(values.size());
  for (std::int64_t c = 0; c < cols; ++c) {
    write_float(operands.out, problem.out_dtype, row * operands.out_stride + c,
                static_cast<float>(values[c] * factor));
  }
}

/// Rows that no valid position names stay zero, so every element is written whatever the indices.
void zero_rows(const Problem& problem, const Operands& operands, std::int64_t cols) {
  if (problem.tails == Tails::kUndefined) return;
  const std::vector<double> zeros(cols, 0.0);
  for (std::int64_t r = 0; r < problem.output_rows(); ++r)
    store_row(problem, operands, r, zeros, 1.0);
}

/// y[n] += sum over k of x[k] W[n, k]. An empty x adds nothing.
template <typename T>
void times_transposed(const std::vector<double>& x, const T* w, std::int64_t w_stride,
                      std::vector<double>& y) {
  for (std::size_t n = 0; n < y.size(); ++n) {
    for (std::size_t k = 0; k < x.size(); ++k) y[n] += x[k] * to_float(w[n * w_stride + k]);
  }
}

/// dx[k] += sum over n of dy[n] W[n, k].
template <typename T>
void times(const std::vector<double>& dy, const T* w, std::int64_t w_stride,
           std::vector<double>& dx) {
  for (std::size_t n = 0; n < dy.size(); ++n) {
    for (std::size_t k = 0; k < dx.size(); ++k) dx[k] += dy[n] * to_float(w[n * w_stride + k]);
  }
}

template <typename T>
const T* low_weights_of(const Problem& problem, const Operands& operands, std::int64_t expert) {
  const std::int64_t rows = low_rank_part(problem).n;
  return static_cast<const T*>(operands.low_weights) + expert * rows * operands.low_weights_stride;
}

/// An expert's quantised W as an ordinary matrix.
template <typename T>
std::vector<T> decoded_weights(const Problem& problem, const Operands& operands,
                               std::int64_t expert) {
  const QuantizedExpert packed(problem.quantization, operands.w, operands.w_scales, expert,
                               problem.n, problem.k);
  std::vector<T> w(problem.n * problem.k);
  for (std::int64_t n = 0; n < problem.n; ++n) {
    for (std::int64_t k = 0; k < problem.k; ++k) store(packed.at(n, k), w[n * problem.k + k]);
  }
  return w;
}

template <typename T>
void row_gemm(const Problem& problem, const Operands& operands) {
  const bool forward = problem.op == Op::kForward;
  const SegmentList segments = segments_of(problem, operands);
  zero_rows(problem, operands, problem.output_columns());
  std::vector<double> product(problem.features());
  for (std::int64_t e = 0; e < problem.experts; ++e) {
    const T* w = static_cast<const T*>(operands.w) + e * problem.n * operands.w_stride;
    std::vector<T> decoded;
    if (!problem.quantization.plain() && segments[e].begin < segments[e].end) {
      decoded = decoded_weights<T>(problem, operands, e);
      w = decoded.data();
    }
    for (std::int64_t r = segments[e].begin; r < segments[e].end; ++r) {
      const Row row = find_row(problem, operands, r);
      if (!row.valid && problem.scatters()) continue;
      std::vector<double> source;
      if (row.valid && forward) {
        source = load_row<T>(operands.x, row.source, operands.x_stride, problem.k);
      } else if (row.valid) {
        source = load_row<T>(operands.dy, row.source, operands.dy_stride, problem.n);
      }
      const auto multiply = forward ? times_transposed<T> : times<T>;
      std::fill(product.begin(), product.end(), 0.0);
      multiply(source, w, operands.w_stride, product);
      if (problem.low_rank > 0) {
        multiply(load_row<T>(operands.low_rows, r, operands.low_rows_stride, problem.low_rank),
                 low_weights_of<T>(problem, operands, e), operands.low_weights_stride, product);
      }
      store_row(problem, operands, row.destination, finished_row(problem, operands, e, product),
                row.factor);
    }
  }
}

template <typename T>
void dw_typed(const Problem& problem, const Operands& operands) {
  const SegmentList segments = segments_of(problem, operands);
  std::vector<double> dw;  // allocated once: fresh pages for every expert would take longer than it
  for (std::int64_t e = 0; e < problem.experts; ++e) {
    dw.assign(problem.n * problem.k, 0.0);
    for (std::int64_t r = segments[e].begin; r < segments[e].end; ++r) {
      const Row row = find_row(problem, operands, r);
      if (!row.valid) continue;
      const std::int64_t x_row = problem.gathers_x() ? row.source : r;
      const std::int64_t dy_row = problem.gathers_dy() ? row.source : r;
      const auto x = load_row<T>(operands.x, x_row, operands.x_stride, problem.k);
      const auto dy = load_row<T>(operands.dy, dy_row, operands.dy_stride, problem.n);
      for (std::int64_t n = 0; n < problem.n; ++n) {
        const double scaled = row.factor * dy[n];
        for (std::int64_t k = 0; k < problem.k; ++k) dw[n * problem.k + k] += scaled * x[k];
      }
    }
    with_element_type(problem.out_dtype, [&]<typename Out>(Out*) {
      for (std::int64_t n = 0; n < problem.n; ++n) {
        Out* row = static_cast<Out*>(operands.out) + (e * problem.n + n) * operands.out_stride;
        for (std::int64_t k = 0; k < problem.k; ++k) {
          const double before = problem.accumulate ? to_float(row[k]) : 0.0;
          store(static_cast<float>(before + dw[n * problem.k + k]), row[k]);
        }
      }
    });
  }
}

}  // namespace

void run(const Problem& problem, const Operands& operands) {
  with_element_type(problem.dtype, [&]<typename T>(T*) {
    problem.op == Op::kDw ? dw_typed<T>(problem, operands) : row_gemm<T>(problem, operands);
  });
}

}  // namespace moegemm::cpu::reference
