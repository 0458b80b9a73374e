#include "cuda/sm80/heuristic.h"

#include <algorithm>

namespace moegemm::cuda::sm80 {
namespace {

/// Tiles of this many rows and fewer stream weights: nothing else limits them.
int decode_rows(const Problem& problem) { return problem.quantization.plain() ? 32 : 16; }

}  // namespace

int preference_rank(const KernelEntry& kernel, const Problem& problem, const DeviceFacts& facts) {
  // Loading elements one by one is for what vectors cannot do.
  if (kernel.any_alignment) return 6;
  // Warps that only copy, and large tiles, are fastest wherever they are compiled. Else two blocks
  // hide each other's stores and barriers; which kernels fit twice depends on the GPU.
  const bool alone =
      resident_blocks(kernel, problem, facts) < std::min(kernel.blocks_per_multiprocessor, 2);
  const int way = kernel.copies_apart ? 0 : (alone ? 2 : 1);
  if (problem.op == Op::kDw) return way;
  const double experts =
      std::max<double>(1, std::min<double>(problem.experts, problem.planned_rows()));
  const double rows =
      static_cast<double>(problem.planned_rows()) / experts;  // average of those in use
  const int decode = decode_rows(problem);
  const bool few_rows = rows <= 0.75 * decode;
  return (few_rows == (kernel.info.tile.rows <= decode) ? 0 : 3) + way;
}

bool aligning_first_is_faster(const Problem& problem) {
  // Loading elements one by one multiplies at a sixth of the speed. What copying W (of dW: storing
  // it twice) takes is 40 rows' worth of that for each expert; the rest is for the rows themselves.
  constexpr std::int64_t kLeastRows = 48;
  return problem.planned_rows() >= kLeastRows * problem.experts;
}

int choose_among(std::span<const KernelEntry* const> feasible, const Problem& problem,
                 const DeviceFacts& facts) {
  int best = 0;
  int best_rank = preference_rank(*feasible[0], problem, facts);
  for (std::size_t i = 1; i < feasible.size(); ++i) {
    const int rank = preference_rank(*feasible[i], problem, facts);
    if (rank < best_rank) {
      best = static_cast<int>(i);
      best_rank = rank;
    }
  }
  return best;
}

}  // namespace moegemm::cuda::sm80
