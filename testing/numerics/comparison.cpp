#include "testing/numerics/comparison.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <sstream>

#include "testing/numerics/oracle.h"
#include "testing/numerics/parallel.h"
#include "testing/numerics/sum_bound.h"

namespace moegemm::testing {
namespace {

constexpr double kTf32Roundoff = 0x1p-11;

/// The findings of one thread, merged at the end.
struct Findings {
  std::int64_t mismatches = 0;
  std::int64_t elements = 0;
  std::int64_t first_row = -1;
  std::string first;
  double error_squares = 0;
  double bound_squares = 0;
  double reference_squares = 0;

  void mismatch(std::int64_t row, std::int64_t col, const std::string& what) {
    if (mismatches++ == 0) {
      first_row = row;
      first = "[" + std::to_string(row) + ", " + std::to_string(col) + "]: " + what;
    }
  }
};

class RowComparer {
 public:
  RowComparer(const HostProblem& problem, const std::vector<unsigned char>& out,
              const Accuracy& accuracy)
      : p_(problem), out_(out.data()), accuracy_(accuracy) {}

  void compare(std::int64_t row, Findings& found) {
    const std::size_t choices = p_.scatters() ? p_.positions_of[row].size() : 1;
    if (must_be_left(row)) {
      for (std::int64_t c = 0; c < p_.out.cols; ++c) {
        if (!is_poison(p_.out_dtype, out_, p_.out.position(row, c))) {
          found.mismatch(row, c, "outside every segment, yet it was stored to");
        }
      }
    } else if (choices > 1) {
      compare_choices(row, choices, found);
    } else {
      expect_row(p_, row, expected_);
      for (std::int64_t c = 0; c < p_.out.cols; ++c) compare_element(row, c, found);
    }
    compare_padding(row, found);
  }

 private:
  /// Rows of Y or dX that nobody stores, where nobody may.
  bool must_be_left(std::int64_t row) const {
    if (p_.op == Op::kDw || p_.spec.tails == Tails::kZero) return false;
    return p_.scatters() ? p_.positions_of[row].empty() : p_.owners[row] < 0;
  }

  void compare_element(std::int64_t row, std::int64_t col, Findings& found) {
    const std::int64_t at = p_.out.position(row, col);
    const double initial = expected_.initial_scale != 0 ? p_.out.row(row)[col] : 0.0;
    const double got = decode(p_.out_dtype, out_, at);
    const double want = expected_.value[col] + initial;
    if (is_poison(p_.out_dtype, out_, at)) return found.mismatch(row, col, "not written");
    if (std::isnan(want) || std::isnan(got) || std::isinf(want)) {
      if (!is_close(got, want, 0)) found.mismatch(row, col, difference(got, want, 0));
      return;
    }
    const double bound =
        expected_.activated
            ? activation_bound(col)
            : error_bound(p_, accuracy_, expected_.length, expected_.value[col],
                          p_.spec.activation ? 0.0 : expected_.squares[col], initial);
    const double error = std::fabs(got - want);
    if (!is_close(got, want, bound)) found.mismatch(row, col, difference(got, want, bound));
    if (expected_.activated && is_clamped(col)) return;  // all have the same error
    ++found.elements;
    found.error_squares += error * error;
    found.bound_squares += bound * bound;
    found.reference_squares += want * want;
  }

  /// How far a column of the product may be off when the activation sees it.
  double product_error(std::int64_t column) const {
    const double value = std::fabs(expected_.product[column]);
    double error = kFp32Roundoff * value;
    if (!accuracy_.double_accumulation) {
      error += accumulation_error(expected_.length, expected_.squares[column]);
    }
    const double bare = std::fabs(expected_.bare[column]);
    return error + (accuracy_.rounded_product ? half_ulp(p_.dtype, bare + error) : 0.0);
  }

  /// The limit alone decides the result.
  bool is_clamped(std::int64_t col) const {
    const Activation& a = *p_.spec.activation;
    const double limit = a.limit;
    if (!(expected_.product[gate_column(a, col)] > limit)) return false;
    return !a.gated() || std::fabs(expected_.product[up_column(a, p_.out.cols, col)]) > limit;
  }

  double activation_bound(std::int64_t col) const {
    const Activation& a = *p_.spec.activation;
    const std::int64_t gate_at = gate_column(a, col);
    const std::int64_t up_at = a.gated() ? up_column(a, p_.out.cols, col) : gate_at;
    const double gate = expected_.product[gate_at];
    const double up = a.gated() ? expected_.product[up_at] : 0.0;
    const double gate_error = product_error(gate_at);
    const double up_error = a.gated() ? product_error(up_at) : 0.0;
    const double want = expected_.value[col];
    double moved = 0;
    double share = 0;  // of the inputs: what an ulp of theirs does, times their size
    for (const double sign : {-1.0, 1.0}) {
      for (const double other : {-1.0, 1.0}) {
        const double at = activation_at(a, gate + sign * gate_error, up + other * up_error);
        moved = std::max(moved, std::fabs(at - want));
      }
      constexpr double kStep = 1e-5;
      const double near = activation_at(a, gate * (1 + sign * kStep), up * (1 + sign * kStep));
      share = std::max(share, std::fabs(near - want) / kStep);
    }
    // Subnormal numbers may be flushed to zero.
    const double computed = 1.1 * moved + 64 * kFp32Roundoff * (std::fabs(want) + share) + 0x1p-126;
    return computed + half_ulp(p_.out_dtype, std::fabs(want) + computed);
  }

  /// Several positions name the row: each element is that of one of them.
  void compare_choices(std::int64_t row, std::size_t choices, Findings& found) {
    std::vector<bool> met(p_.out.cols, false);
    for (std::size_t choice = 0; choice < choices; ++choice) {
      expect_row(p_, row, expected_, choice);
      for (std::int64_t c = 0; c < p_.out.cols; ++c) {
        Findings of_choice;
        if (!met[c]) compare_element(row, c, of_choice);
        met[c] = met[c] || of_choice.mismatches == 0;
      }
    }
    for (std::int64_t c = 0; c < p_.out.cols; ++c) {
      if (!met[c]) found.mismatch(row, c, "the element of no position that names this row");
    }
  }

  void compare_padding(std::int64_t row, Findings& found) {
    if (row + 1 == p_.out.rows) return;  // the allocation ends here
    for (std::int64_t c = p_.out.cols; c < p_.out.stride; ++c) {
      if (!is_poison(p_.out_dtype, out_, p_.out.position(row, c))) {
        found.mismatch(row, c, "between two rows, yet it was stored to");
      }
    }
  }

  const HostProblem& p_;
  const unsigned char* out_;
  Accuracy accuracy_;
  ExpectedRow expected_;
};

void merge(const Findings& from, Findings& into) {
  if (from.mismatches > 0 && (into.mismatches == 0 || from.first_row < into.first_row)) {
    into.first_row = from.first_row;
    into.first = from.first;
  }
  into.mismatches += from.mismatches;
  into.elements += from.elements;
  into.error_squares += from.error_squares;
  into.bound_squares += from.bound_squares;
  into.reference_squares += from.reference_squares;
}

}  // namespace

double error_bound(const HostProblem& p, const Accuracy& accuracy, std::int64_t length,
                   double value, double squares, double initial) {
  double computed = (p.spec.multiply ? 4 : 1) * kFp32Roundoff * std::fabs(value);
  if (!accuracy.double_accumulation) {
    const double term_norm = std::sqrt(squares);
    computed += accumulation_error(length, squares);
    if (p.spec.multiply && p.op == Op::kDw) computed += 6 * unit_roundoff(p.dtype) * term_norm;
    if (p.spec.tf32) computed += 9 * kTf32Roundoff * term_norm;
  }
  if (p.spec.accumulate) computed += 2 * kFp32Roundoff * (std::fabs(initial) + std::fabs(value));
  return computed + half_ulp(p.out_dtype, std::fabs(value + initial) + computed);
}

Comparison compare(const HostProblem& p, const std::vector<unsigned char>& out,
                   const Accuracy& accuracy, std::int64_t row_limit) {
  const std::int64_t rows = p.out.cols == 0 ? 0 : p.out.rows;
  const bool sample = row_limit > 0 && row_limit < rows;
  const std::int64_t count = sample ? row_limit : rows;
  const double work = std::max(oracle_work(p), static_cast<double>(rows * p.out.cols)) *
                      (rows > 0 ? static_cast<double>(count) / static_cast<double>(rows) : 0.0);
  Findings all;
  std::mutex merging;
  parallel_for(count, static_cast<std::int64_t>(work), [&](std::int64_t begin, std::int64_t end) {
    RowComparer comparer(p, out, accuracy);
    Findings found;
    for (std::int64_t i = begin; i < end; ++i) {
      comparer.compare(sample ? i * (rows - 1) / (count - 1) : i, found);
    }
    const std::lock_guard lock(merging);
    merge(found, all);
  });
  return {.mismatches = all.mismatches,
          .first = all.first,
          .error_norm = std::sqrt(all.error_squares),
          .bound_norm = std::sqrt(all.bound_squares),
          .reference_norm = std::sqrt(all.reference_squares),
          .elements = all.elements};
}

std::string describe(const Comparison& c) {
  std::ostringstream text;
  if (c.mismatches > 0) text << c.mismatches << " elements are wrong, the first at " << c.first;
  if (!c.norm_passed()) {
    text << (c.mismatches > 0 ? "; " : "") << "the errors' norm " << c.error_norm
         << " is more than 0.75 of the bounds' norm " << c.bound_norm;
  }
  text << " (||out - ref|| / ||ref|| = " << c.error_norm / c.reference_norm << ")";
  return text.str();
}

}  // namespace moegemm::testing
