#include "conformance/driver/large_problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "conformance/driver/large_weights.h"
#include "moegemm/error.h"
#include "testing/device/device_vector.h"
#include "testing/numerics/parallel.h"
#include "testing/numerics/random.h"
#include "testing/numerics/sum_bound.h"
#include "testing/problem/large_output.h"
#include "testing/problem/periodic_matrix.h"

namespace moegemm::testing {
namespace {

constexpr DType kDtype = DType::kBFloat16;

std::vector<std::int64_t> sizes_of(const LargeProblem& problem) {
  if (!problem.m_sizes.empty()) return problem.m_sizes;
  std::vector<std::int64_t> sizes(problem.experts, problem.rows / problem.experts);
  for (std::int64_t e = 0; e < problem.rows % problem.experts; ++e) ++sizes[e];
  return sizes;
}

/// gather_indices[r] = r * step mod M with a step that shares no factor with M: a permutation that
/// jumps over the whole range.
std::vector<std::int64_t> jumping_permutation(std::int64_t rows) {
  std::int64_t step = rows / 2 + 1;
  while (std::gcd(step, rows) != 1) ++step;
  std::vector<std::int64_t> indices(rows);
  for (std::int64_t r = 0; r < rows; ++r) indices[r] = r * step % rows;
  return indices;
}

class LargeRun {
 public:
  LargeRun(const LargeProblem& problem, std::int64_t sampled_rows)
      : p_(problem),
        x_(kDtype, problem.op == Op::kDx ? 0 : problem.rows, problem.k, 1),
        w_(kDtype,
           problem.op == Op::kDw || !problem.weights.empty() ? 0 : problem.experts * problem.n,
           problem.k, 2),
        dy_(kDtype, problem.op == Op::kForward ? 0 : problem.rows, problem.n, 3),
        out_rows_(problem.op == Op::kDw ? problem.experts * problem.n : problem.rows),
        out_cols_(problem.op == Op::kForward ? problem.n : problem.k),
        m_sizes_(sizes_of(problem)),
        indices_(jumping_permutation(problem.rows)) {
    begins_.push_back(0);
    for (const std::int64_t size : m_sizes_) begins_.push_back(begins_.back() + size);
    position_of_.resize(problem.rows);
    for (std::int64_t r = 0; r < problem.rows; ++r) position_of_[indices_[r]] = r;
    if (!problem.weights.empty()) {
      packed_.emplace(parse_quantization(problem.weights, problem.scale_type, problem.n, problem.k),
                      problem.experts, problem.n, problem.k, 2);
    }
    const std::int64_t count = std::min(sampled_rows, out_rows_);
    for (std::int64_t i = 0; i < count; ++i) {
      sampled_.push_back(count > 1 ? i * (out_rows_ - 1) / (count - 1) : 0);
    }
  }

  std::int64_t bytes() const {
    return x_.bytes() + w_.bytes() + (packed_ ? packed_->bytes() : 0) + dy_.bytes() +
           out_rows_ * out_cols_ * size_bytes(kDtype);
  }

  void allocate(Memory& memory) {
    x_.allocate(memory);
    w_.allocate(memory);
    if (packed_) packed_->allocate(memory);
    dy_.allocate(memory);
    out_.emplace(memory, out_rows_, out_cols_ * size_bytes(kDtype), sampled_);
  }

  void call(const Target& target) const {
    Memory& memory = *target.memory;
    const Device device = memory.device();
    const DeviceVector sizes(memory, DType::kInt32, m_sizes_);
    const DeviceVector indices(memory, DType::kInt32, indices_);
    RoutingView routing;
    routing.m_sizes = sizes.view();
    GemmOptions options;
    options.permute_x = p_.permutation == Permutation::kX;
    options.permute_y = p_.permutation == Permutation::kY;
    options.backend = target.backend;
    if (packed_) {
      options.quantization = packed_->quantization();
      options.w_scales = packed_->scales(device);
    }
    void* const weights = packed_ ? packed_->values() : w_.data();
    if (p_.permutation != Permutation::kNone) routing.gather_indices = indices.view();
    const auto matrix = [&](void* data, std::int64_t rows, std::int64_t cols) {
      return TensorView::matrix(data, kDtype, rows, cols, 0, device);
    };
    const auto stack = [&](void* data) {
      return TensorView::stack(data, kDtype, p_.experts, p_.n, p_.k, 0, device);
    };
    const ExecutionContext context = memory.context();
    if (p_.op == Op::kForward) {
      forward(matrix(x_.data(), p_.rows, p_.k), stack(weights), matrix(out_->data(), p_.rows, p_.n),
              routing, options, context);
    } else if (p_.op == Op::kDx) {
      backward_dx(matrix(dy_.data(), p_.rows, p_.n), stack(weights),
                  matrix(out_->data(), p_.rows, p_.k), routing, options, context);
    } else {
      backward_dw(matrix(dy_.data(), p_.rows, p_.n), matrix(x_.data(), p_.rows, p_.k),
                  stack(out_->data()), routing, options, context);
    }
    memory.synchronize();
  }

  /// Empty, or what is wrong with this row of the output.
  std::string compare_row(const Target& target, std::int64_t row) const {
    const std::vector<unsigned char> bytes = out_->row(row);
    std::vector<double> value(out_cols_, 0.0), squares(out_cols_, 0.0);
    const std::int64_t length = expect_row(row, value, squares);
    for (std::int64_t c = 0; c < out_cols_; ++c) {
      const double got = decode(kDtype, bytes.data(), c);
      const double bound =
          sum_bound(kDtype, length, value[c], squares[c], target.accuracy.double_accumulation);
      if (!is_close(got, value[c], bound)) {
        return "[" + std::to_string(row) + ", " + std::to_string(c) +
               "]: " + difference(got, value[c], bound);
      }
    }
    return "";
  }

  const std::vector<std::int64_t>& sampled() const { return sampled_; }
  bool guards_intact() const { return out_->guards_intact(); }

 private:
  std::int64_t owner(std::int64_t position) const {
    for (std::int64_t e = 0; e < p_.experts; ++e) {
      if (position < begins_[e + 1]) return e;
    }
    return -1;
  }

  std::vector<float> row_of_w(std::int64_t row) const {
    return packed_ ? packed_->row(row) : w_.row(row);
  }

  static void add_term(double term, double& value, double& squares) {
    value += term;
    squares += term * term;
  }

  /// The definition; returns the length of the sums.
  std::int64_t expect_row(std::int64_t row, std::vector<double>& value,
                          std::vector<double>& squares) const {
    const bool gather_x = p_.permutation == Permutation::kX;  // topk is 1: index and row agree
    const bool gather_dy = p_.permutation == Permutation::kY;
    if (p_.op == Op::kDw) {
      const std::int64_t e = row / p_.n;
      for (std::int64_t r = begins_[e]; r < begins_[e + 1]; ++r) {
        const double dy = dy_.at(gather_dy ? indices_[r] : r, row % p_.n);
        const std::vector<float> x = x_.row(gather_x ? indices_[r] : r);
        for (std::int64_t k = 0; k < p_.k; ++k) add_term(dy * x[k], value[k], squares[k]);
      }
      return begins_[e + 1] - begins_[e];
    }
    const bool scatters = p_.op == Op::kForward ? gather_dy : gather_x;
    const std::int64_t position = scatters ? position_of_[row] : row;
    const std::int64_t e = owner(position);
    if (e < 0) return 0;
    if (p_.op == Op::kForward) {
      const std::vector<float> x = x_.row(gather_x ? indices_[position] : position);
      for (std::int64_t n = 0; n < p_.n; ++n) {
        const std::vector<float> w = row_of_w(e * p_.n + n);
        for (std::int64_t k = 0; k < p_.k; ++k) {
          add_term(static_cast<double>(x[k]) * w[k], value[n], squares[n]);
        }
      }
      return p_.k;
    }
    const std::vector<float> dy = dy_.row(gather_dy ? indices_[position] : position);
    for (std::int64_t n = 0; n < p_.n; ++n) {
      const std::vector<float> w = row_of_w(e * p_.n + n);
      for (std::int64_t k = 0; k < p_.k; ++k) {
        add_term(static_cast<double>(dy[n]) * w[k], value[k], squares[k]);
      }
    }
    return p_.n;
  }

  const LargeProblem& p_;
  PeriodicMatrix x_, w_, dy_;
  std::optional<LargeWeights> packed_;  ///< instead of w_ where the problem quantises it
  std::int64_t out_rows_;
  std::int64_t out_cols_;
  std::optional<LargeOutput> out_;
  std::vector<std::int64_t> m_sizes_, begins_, indices_, position_of_;
  std::vector<std::int64_t> sampled_;  ///< rows of the output: evenly, the first and the last too
};

}  // namespace

void expect_large_conformance(const Target& target, const LargeProblem& problem,
                              std::int64_t sampled_rows) {
  LargeRun run(problem, sampled_rows);
  const bool in_whole =
      target.memory->device().type != DeviceType::kCpu || !RepeatedMemory::possible();
  const std::int64_t available = target.memory->available_bytes();
  if (in_whole && run.bytes() + run.bytes() / 4 > available) {
    GTEST_SKIP() << "needs " << run.bytes() / 1'000'000 << " MB and a quarter more, "
                 << available / 1'000'000 << " MB are available on "
                 << to_string(target.memory->device());
  }
  run.allocate(*target.memory);
  try {
    run.call(target);
  } catch (const Error& error) {
    if (target.may_throw(error)) {
      GTEST_SKIP() << error.what();
    }
    throw;
  }
  EXPECT_TRUE(run.guards_intact());
  const std::vector<std::int64_t>& sampled = run.sampled();
  std::vector<std::string> faults(sampled.size());
  parallel_for(static_cast<std::int64_t>(sampled.size()), 100'000'000,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i) {
                   faults[i] = run.compare_row(target, sampled[i]);
                 }
               });
  for (const std::string& fault : faults) ASSERT_EQ(fault, "") << problem.name;
}

}  // namespace moegemm::testing
