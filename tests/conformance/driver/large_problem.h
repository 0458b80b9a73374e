#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/driver/targets.h"
#include "moegemm/quantization.h"

namespace moegemm::testing {

/// A product whose tensors are beyond what a 32-bit offset reaches, or what a cache holds. bf16,
/// output in bf16.
struct LargeProblem {
  std::string name;
  Op op = Op::kForward;
  std::int64_t experts = 1;
  std::int64_t n = 1;
  std::int64_t k = 1;
  std::int64_t rows = 1;
  Permutation permutation = Permutation::kNone;
  std::vector<std::int64_t> m_sizes;  ///< [E]; empty: as even as it goes
  std::string weights = {};           ///< a text for parse_quantization; empty: plain
  ScaleType scale_type = ScaleType::kFloat32;

  double work() const {
    return static_cast<double>(rows) * static_cast<double>(n) * static_cast<double>(k);
  }
};

/// Runs it and compares `sampled_rows` rows of the output, the first and the last among them.
/// Skips, with the numbers, when the memory is not there or the backend refuses.
void expect_large_conformance(const Target& target, const LargeProblem& problem,
                              std::int64_t sampled_rows);

}  // namespace moegemm::testing
