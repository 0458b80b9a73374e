#include "cuda/sm80/heuristic.h"

#include <algorithm>

namespace moegemm::cuda::sm80 {
namespace {

/// Tiles of this many rows and fewer stream weights: nothing else limits them.
constexpr int kDecodeRows = 32;

}  // namespace

int preference_rank(const CompiledKernel& kernel, const Problem& problem) {
  // Loading elements one by one is for what vectors cannot do.
  if (kernel.loads == Loads::kElements) return 2;
  if (problem.op == Op::kDw) return 0;
  const double experts = std::max<double>(1, std::min<double>(problem.experts, problem.rows));
  const double rows = static_cast<double>(problem.rows) / experts;  // average of those in use
  const bool few_rows = rows <= 0.75 * kDecodeRows;
  return few_rows == (kernel.info.tile.rows <= kDecodeRows) ? 0 : 1;
}

}  // namespace moegemm::cuda::sm80
