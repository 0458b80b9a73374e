#include "testing/numerics/sum_bound.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "testing/numerics/floats.h"

namespace moegemm::testing {

double accumulation_error(std::int64_t terms, double squares) {
  return 8 * kFp32Roundoff * static_cast<double>(terms) * std::sqrt(squares);
}

double sum_bound(DType out, std::int64_t terms, double value, double squares, bool in_double) {
  // Subnormal numbers of fp32 may be taken for zero.
  const double computed = kFp32Roundoff * std::fabs(value) +
                          (in_double ? 0.0 : accumulation_error(terms, squares) + 0x1p-126);
  return computed + half_ulp(out, std::fabs(value) + computed);
}

bool is_close(double got, double want, double bound) {
  if (std::isnan(want)) return std::isnan(got);
  if (std::isinf(want)) return got == want;
  return std::fabs(got - want) <= bound;  // false for NaN
}

std::string difference(double got, double want, double bound) {
  std::ostringstream text;
  text.precision(9);
  text << "got " << got << ", expected " << want << ", off by " << std::fabs(got - want)
       << ", allowed " << bound;
  return text.str();
}

}  // namespace moegemm::testing
