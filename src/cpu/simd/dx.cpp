#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/simd/drivers.h"
#include "cpu/simd/memory/output_pages.h"
#include "cpu/simd/packed_weights.h"
#include "cpu/simd/rows/row_block.h"

namespace moegemm::cpu::simd {
namespace {

/// Sums of a packed block that are kept while its weights are packed fold by fold: 256 KiB of fp32.
constexpr std::int64_t kKeptSums = 64 * 1024;
constexpr std::int64_t kPackedWords = kFoldSteps * 4 * kMaxPanelCols;
constexpr std::int64_t kMinPackedCols = 2 * kMaxPanelCols;
constexpr std::int64_t kMaxPackedCols = 4 * kMaxPanelCols;
/// Rows that a packed block should serve at least: packing costs about 30 rows of arithmetic.
constexpr std::int64_t kMinPackedRows = 192;
/// Columns of a block that reads weights in place: long stretches of each weight row.
constexpr std::int64_t kMinInPlaceCols = 512;
constexpr std::int64_t kMaxInPlaceCols = 2048;

/// Columns of a packed block of `rows` rows, no more than makes `share` rows times columns.
std::int64_t packed_cols(std::int64_t rows, std::int64_t share) {
  rows = std::max<std::int64_t>(rows, 1);
  const std::int64_t kept =
      std::clamp(kKeptSums / rows / kMaxPanelCols * kMaxPanelCols, kMinPackedCols, kMaxPackedCols);
  return std::clamp(share / rows / kMaxPanelCols * kMaxPanelCols, kMaxPanelCols, kept);
}

bool in_place(DxPath path, std::int64_t expert_rows) {
  return path == DxPath::kInPlace || (path == DxPath::kAdaptive && expert_rows <= kMaxRowsInPlace);
}

WorkList blocks_of(const Problem& problem, const RowLocator& locator, DxPath path,
                   std::int64_t packed_rows, std::int64_t share, std::int64_t tile_rows) {
  WorkList work;
  for (std::int64_t e = 0; e < problem.experts; ++e) {
    if (in_place(path, locator.size(e))) {
      const std::int64_t rows = std::min(locator.size(e), kMaxRowsInPlace);
      const std::int64_t cols = std::clamp(share / (rows + 6), kMinInPlaceCols, kMaxInPlaceCols);
      work.add(e, locator.size(e), problem.k, kMaxRowsInPlace, cols, kMaxPanelCols);
    } else {
      const std::int64_t cols = packed_cols(std::min(locator.size(e), packed_rows), share);
      work.add(e, locator.size(e), problem.k, packed_rows, cols, kMaxPanelCols, tile_rows);
    }
  }
  return work;
}

}  // namespace

void run_dx(const KernelTable& kernels, DxPath path, const Problem& problem,
            const Operands& operands, const ExecutionContext& context) {
  if (problem.output_rows() == 0) return;
  const std::int64_t element = size_bytes(problem.dtype);
  // Nobody needs memory under a tail that is left alone.
  if (problem.tails == Tails::kZero) prepare_output_pages(output_span(problem, operands), context);
  const RowLocator locator(problem, operands);
  const DTypeKernels& typed = kernels_for(kernels, problem.dtype);
  const int workers = executor_of(context).concurrency();
  const std::int64_t cost = locator.cost();
  const std::int64_t share = balanced_share(cost * problem.k, workers);
  const std::int64_t packed_rows =
      std::clamp(share / kMaxPackedCols, kMinPackedRows, RowBlock::kMaxRows);
  const WorkList work = blocks_of(problem, locator, path, packed_rows, share, kernels.tile_rows);
  const auto weights_of = [&](const Block& block) {
    return static_cast<const char*>(operands.w) +
           (block.expert * problem.n * operands.w_stride + block.first_col) * element;
  };
  const bool decodes = !problem.quantization.plain();
  const std::int64_t decoded_elems = std::max(kDecodedTerms * decoded_stride(kMaxPackedCols),
                                              kGroupTerms * decoded_stride(kDecodedCols));
  const std::int64_t decoded_bytes = decodes ? decoded_elems * element : 0;
  const std::vector<char> zeros = zero_source(problem, problem.n);
  const std::int64_t words = kDxWordRows * kFoldSteps;
  const std::int64_t totals = std::max(std::max(kKeptSums, packed_rows * kMinPackedCols),
                                       kMaxRowsInPlace * 2 * kMaxInPlaceCols);
  const std::int64_t scratch_bytes =
      RowBlock::scratch_bytes(std::max(packed_rows, kMaxRowsInPlace), 2 * kMaxInPlaceCols) +
      Scratch::bytes_of<std::uint32_t>(kPackedWords) + Scratch::bytes_of<std::uint32_t>(words) +
      Scratch::bytes_of<float>(totals) + Scratch::bytes_of<std::byte>(decoded_bytes);
  const double operations = static_cast<double>(cost) * problem.n * problem.k;
  work.run(context, operations, [&](const WorkList::Turn& turn) {
    const Block& block = turn.block;
    const Block& next = turn.next;
    Scratch& scratch = Scratch::of_this_thread();
    scratch.reserve(scratch_bytes);
    // Any N elements of the expert's weights stand in for a dY row that reads as zeros.
    const void* stand_in = zeros.empty()
                               ? static_cast<const char*>(operands.w) +
                                     block.expert * problem.n * operands.w_stride * element
                               : zeros.data();
    const RowBlock rows(locator, problem, operands, block, stand_in, scratch);
    DxTask task;
    task.dy = rows.sources();
    task.rows = block.rows;
    PackedWeights packed_w;
    static_cast<WeightBlock&>(task) =
        weight_block(problem, operands, block, decodes ? nullptr : weights_of(block), packed_w,
                     scratch.take<std::byte>(decoded_bytes));
    task.cols = block.cols;
    task.n = problem.n;
    task.low = rows.low_rank_part();
    task.out = rows.output();
    if (next.expert >= 0 && !decodes) {
      task.next_w = weights_of(next);
      task.next_cols = next.cols;
    }
    task.panels = scratch.take<std::uint32_t>(kPackedWords);
    task.words = scratch.take<std::uint32_t>(words);
    task.totals = scratch.take<float>(totals);
    (in_place(path, locator.size(block.expert)) ? typed.dx_in_place : typed.dx_packed)(task);
    rows.clear_zero_rows();
  });
  clear_unwritten_rows(locator, problem, context);
}

}  // namespace moegemm::cpu::simd
