#pragma once

#include <algorithm>
#include <cstdint>

#include "moegemm/problem.h"

namespace moegemm::cuda {

/// Rows of all segments together, at most, that kernels count. Segments that overlap have more than
/// the tensor; so many of those at least are counted.
inline std::int64_t most_counted_rows(Segments segments, std::int64_t rows, std::int64_t experts) {
  constexpr std::int64_t kMostOverlapping = 1 << 24;
  if (segments == Segments::kPacked) return rows;
  return std::max(rows, std::min(kMostOverlapping, rows * experts));
}

}  // namespace moegemm::cuda
