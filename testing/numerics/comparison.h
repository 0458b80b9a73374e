#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "testing/problem/host_problem.h"

/// How far a result may be from the exact one.
///
/// A result is a sum of L products t_i, accumulated in fp32 and rounded once to the output's dtype.
/// Products of 16-bit numbers are exact in fp32; those of fp32 numbers are rounded or fused.
///   1. Each addition may be off by 2u of the partial sum (u = 2^-24: round to nearest gives u,
///      tensor cores truncate and give 2u): together 2u * sum |s_i|.
///   2. Test data have random signs, so partial sums walk: |s_i| <= 4 * sqrt(sum t_i^2) with
///      margin, whatever the order. Hence accumulation <= 8u * L * sqrt(sum t_i^2). For operands of
///      even size sqrt(sum t_i^2) is ||a|| ||b|| / sqrt(L): the bound of norms and dot length,
///      8u * sqrt(L) ||a|| ||b||, but it stays sharp when a few terms dominate.
///   3. The sum is an fp32 number: u |ref|. The fused multiply rounds it again, and its weight
///      may be off by as much: 4u |ref| with margin. For dW it scales an operand
///      instead, which a kernel may round to the input's dtype (unit roundoff v) before the
///      product: L independent errors of at most v t_i: 6v * sqrt(sum t_i^2). Where the scaled
///      operand (either may be) is subnormal, t_i is what the least normal one would make of it.
///      TF32 rounds both operands (v = 2^-11): 9v * sqrt(sum t_i^2).
///   4. Adding to an existing fp32 value: 2u (|initial| + |ref|).
///   5. The one rounding to the output: half an ulp of |ref| + the above.
/// A backend that accumulates in double has only 3 (without the operand's rounding), 4 and 5.
///
/// An activation sees a product that is off by 2 and 3 (and, where it is a pass of its own, by the
/// product's rounding to the input's dtype): the result may be off by what the exact activation
/// makes of that, by 64u of itself and of its inputs' share (an approximated exponential of x has 2
/// + 1.16 |x| ulps, and |x| stays below 30), and by 5.
///
/// Over a whole output errors average out: roundings are spread evenly inside their bound, which
/// makes the norm of the errors 0.58 of the norm of the bounds. More than 0.75, over at least 1024
/// elements, means a second rounding or a bias. Results that a limit clamps are all the same and
/// do not count here.
///
/// NaN and infinities must stand exactly where the exact result has them. A poisoned element that
/// is still there was not written: it always fails.
namespace moegemm::testing {

struct Accuracy {
  bool double_accumulation = false;  ///< the reference's
  /// An activation sees the product in the inputs' dtype, in the kernel or in a pass after it;
  /// only the reference activates what was not rounded.
  bool rounded_product = false;
};

struct Comparison {
  std::int64_t mismatches = 0;
  std::string first;      ///< where and how the first mismatch is off
  double error_norm = 0;  ///< ||out - ref||
  double bound_norm = 0;
  double reference_norm = 0;
  std::int64_t elements = 0;

  bool passed() const { return mismatches == 0 && norm_passed(); }
  bool norm_passed() const { return elements < 1024 || error_norm <= 0.75 * bound_norm; }
};

/// Compares every element of the output, and of what lies between its rows, with the oracle.
/// `out` is the output's allocation after the call. `row_limit` > 0 compares about that many rows,
/// spread over all and including the first and the last.
Comparison compare(const HostProblem& problem, const std::vector<unsigned char>& out,
                   const Accuracy& accuracy, std::int64_t row_limit = 0);

/// The bound above for one element.
double error_bound(const HostProblem& problem, const Accuracy& accuracy, std::int64_t length,
                   double value, double squares, double initial);

std::string describe(const Comparison& comparison);

}  // namespace moegemm::testing
