#pragma once

#include <cstdint>
#include <string>

#include "moegemm/tensor.h"

/// What every check of an element shares: how far it may be from the exact sum, whether it is, and
/// how that reads. comparison.h derives the bound; the points named here are its own.
namespace moegemm::testing {

inline constexpr double kFp32Roundoff = 0x1p-24;

/// Points 1 and 2: fp32 accumulation of this many terms with this sum of their squares.
double accumulation_error(std::int64_t terms, double squares);

/// Points 1, 2, 3 and 5: such a sum, which is `value` exactly, rounded once to `out`. `in_double`:
/// accumulated without error.
double sum_bound(DType out, std::int64_t terms, double value, double squares,
                 bool in_double = false);

/// NaN and infinities stand where they must, everything else is within the bound.
bool is_close(double got, double want, double bound);

/// "got 1.5, expected 1, off by 0.5, allowed 0.01".
std::string difference(double got, double want, double bound);

}  // namespace moegemm::testing
