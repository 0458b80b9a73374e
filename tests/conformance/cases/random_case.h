#pragma once

#include "testing/numerics/random.h"
#include "testing/problem/problem_case.h"

namespace moegemm::testing {

/// A small problem with any combination of options and bad data that the list of cases has.
/// `aligned` keeps extents, strides and bases at multiples of 8, so that no kernel refuses it.
struct RandomCase {
  ProblemCase problem;
  Op op = Op::kForward;
  DType dtype = DType::kBFloat16;
};
RandomCase random_case(Random& random, bool aligned);

}  // namespace moegemm::testing
