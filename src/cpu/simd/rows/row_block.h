#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/simd/kernel_table.h"
#include "cpu/simd/memory/scratch.h"
#include "cpu/simd/rows/row_locator.h"
#include "cpu/simd/work_list.h"

namespace moegemm::cpu::simd {

/// The rows of one block of Y or dX as the kernels take them.
class RowBlock {
 public:
  /// Most rows of a block: bounds the scratch memory of their pointers.
  static constexpr std::int64_t kMaxRows = 768;

  static constexpr std::int64_t scratch_bytes(std::int64_t rows, std::int64_t cols) {
    return 3 * Scratch::bytes_of<void*>(rows) + Scratch::bytes_of<float>(rows) +
           Scratch::bytes_of<float>(cols + kMaxLanes);
  }

  /// `stand_in` is memory as long as a source row: a row that reads as zeros is computed from it
  /// and the result replaced by zeros, so that no kernel has to know. With a low-rank part, which
  /// such a row has like any other, it has to be zeros.
  RowBlock(const RowLocator& locator, const Problem& problem, const Operands& operands,
           const Block& block, const void* stand_in, Scratch& scratch);

  const void* const* sources() const { return sources_; }
  /// The block's low-rank part; empty where there is none.
  LowRankPart low_rank_part() const;
  OutputRows output() const;

  /// Rewrites the block's columns of the rows that read as zeros: zero, or the bias. Call it after
  /// the kernel.
  void clear_zero_rows() const;

 private:
  const RowLocator& locator_;
  const Problem& problem_;
  const Operands& operands_;
  const Block& block_;
  std::int64_t first_position_;
  const void** sources_;
  const void** low_rows_;
  void** destinations_;
  float* router_weights_;
  float* bias_;  ///< of the block's columns
  bool has_zero_rows_ = false;
};

/// What a row that reads as zeros is computed from where it has a low-rank part, or where the
/// weights are packed: `depth` zeros, else nothing.
std::vector<char> zero_source(const Problem& problem, std::int64_t depth);

/// Rows of Y or dX that nothing stores become zero, in parallel.
void clear_unwritten_rows(const RowLocator& locator, const Problem& problem,
                          const ExecutionContext& context);

/// Smallest block that is still worth a turn, such that the `total` work (in any unit) makes about
/// so many turns per worker: then the last turns, of unequal length, cost little.
std::int64_t balanced_share(std::int64_t total, int workers, int turns = 8);

}  // namespace moegemm::cpu::simd
