#pragma once

#include <vector>

#include "testing/problem/problem_case.h"

/// The one list of cases, in order of subject. Every backend runs all of them for each product and
/// dtype. Shapes stay small: what matters is which edges they touch.
namespace moegemm::testing {

std::vector<ProblemCase> zero_size_cases();  ///< no rows, no tokens, experts without rows
std::vector<ProblemCase> segment_cases();    ///< how rows spread over experts, every tail length
std::vector<ProblemCase> shape_cases();      ///< N and K from 1 to large
std::vector<ProblemCase> option_cases();     ///< permutation, multiply, dtypes, accumulation
std::vector<ProblemCase> epilogue_cases();   ///< biases and activations
std::vector<ProblemCase> low_rank_cases();   ///< more depth, with operands of its own
std::vector<ProblemCase> stride_cases();     ///< strided and unaligned tensors
std::vector<ProblemCase> capacity_cases();   ///< rows that are not T * topk
std::vector<ProblemCase> placement_cases();  ///< segments with gaps, and tails
std::vector<ProblemCase> hazard_cases();     ///< bad sizes, bad indices, NaN and infinities

std::vector<ProblemCase> quantised_cases();  ///< weights of every format

std::vector<ProblemCase> all_cases();

}  // namespace moegemm::testing
