#include <algorithm>
#include <cstring>

#include "cpu/parallel.h"
#include "cpu/simd/drivers.h"
#include "cpu/simd/memory/output_pages.h"
#include "cpu/simd/rows/row_block.h"

namespace moegemm::cpu::simd {
namespace {

/// Rows of a segment that are packed at a time; even, so that pairs never straddle chunks.
constexpr std::int64_t kChunkRows = 1024;
/// Rows of dW in a block: packing X once costs about ten of them.
constexpr std::int64_t kMinWeightRows = 128;
/// More turns than other products make: a worker that stays with an expert keeps its packed X.
constexpr int kTurns = 24;
/// Output elements of a block whose sums are kept between chunks: 1 MiB of fp32.
constexpr std::int64_t kMaxKeptSums = 256 * 1024;
/// Writing an element costs about as much as so many rows of arithmetic.
constexpr std::int64_t kStoreCost = 8;

std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::int64_t chunk_steps(std::int64_t segment_rows, int terms_per_step) {
  const std::int64_t rows = std::clamp<std::int64_t>(segment_rows, 1, kChunkRows);
  return (rows + terms_per_step - 1) / terms_per_step;
}

/// Columns of a block, in whole panels, so that the packed X of one chunk fits kPanelWords.
std::int64_t block_columns(std::int64_t k, std::int64_t steps) {
  static_assert(kChunkRows * kMaxPanelCols <= kPanelWords);
  return std::min(kPanelWords / steps / kMaxPanelCols * kMaxPanelCols, round_up(k, kMaxPanelCols));
}

/// An expert without rows: its gradient is zero.
void clear_block(const Problem& problem, const Operands& operands, const Block& block, void* out) {
  if (problem.accumulate) return;
  const std::int64_t element = size_bytes(problem.out_dtype);
  for (std::int64_t n = 0; n < block.rows; ++n) {
    std::memset(static_cast<char*>(out) + n * operands.out_stride * element, 0,
                block.cols * element);
  }
}

/// The blocks of all experts, and the scratch memory that the largest of them takes.
struct DwBlocks {
  WorkList work{WorkList::Order::kRowsFirst};
  std::int64_t panel_words = 0;
  std::int64_t kept_sums = 0;

  std::int64_t scratch_bytes() const {
    return 2 * Scratch::bytes_of<void*>(kChunkRows) + Scratch::bytes_of<float>(kChunkRows) +
           Scratch::bytes_of<std::uint32_t>(panel_words) +
           Scratch::bytes_of<std::uint32_t>(kChunkRows * kDyPanelCols) +
           Scratch::bytes_of<float>(kept_sums);
  }
};

/// `share` is the cost that a turn should have.
DwBlocks cut_into_blocks(const Problem& problem, const RowLocator& locator, int terms_per_step,
                         std::int64_t share) {
  DwBlocks blocks;
  for (std::int64_t e = 0; e < problem.experts; ++e) {
    const std::int64_t rows = locator.size(e);
    const std::int64_t max_cols = block_columns(problem.k, chunk_steps(rows, terms_per_step));
    std::int64_t max_rows = share * problem.k / max_cols / (rows + kStoreCost);
    if (rows > kChunkRows) max_rows = std::min(max_rows, kMaxKeptSums / max_cols);
    max_rows = std::max(max_rows / kDyPanelCols * kDyPanelCols, kMinWeightRows);
    blocks.work.add(e, problem.n, problem.k, max_rows, max_cols, kMaxPanelCols);
    blocks.panel_words = std::max(blocks.panel_words, chunk_steps(rows, terms_per_step) * max_cols);
    if (rows > kChunkRows) {
      blocks.kept_sums = std::max(blocks.kept_sums, (max_rows + kDyPanelCols) * max_cols);
    }
  }
  return blocks;
}

}  // namespace

void run_dw(const KernelTable& kernels, bool stream, const Problem& problem,
            const Operands& operands, const ExecutionContext& context) {
  const std::int64_t in_element = size_bytes(problem.dtype);
  const std::int64_t out_element = size_bytes(problem.out_dtype);
  if (!problem.accumulate) prepare_output_pages(output_span(problem, operands), context);
  const RowLocator locator(problem, operands);
  const DTypeKernels& typed = kernels_for(kernels, problem.dtype);
  const DwFn kernel = problem.multiply ? typed.dw_weighted : typed.dw;
  const int terms_per_step = problem.multiply ? 1 : typed.terms_per_step;

  const std::int64_t cost = locator.rows() + problem.experts * kStoreCost;
  const std::int64_t share =
      balanced_share(cost * problem.n, executor_of(context).concurrency(), kTurns);
  const DwBlocks blocks = cut_into_blocks(problem, locator, terms_per_step, share);
  const std::int64_t scratch_bytes = blocks.scratch_bytes();
  const double operations = static_cast<double>(cost) * problem.n * problem.k;
  blocks.work.run(context, operations, [&](const WorkList::Turn& turn) {
    const Block& block = turn.block;
    void* out =
        static_cast<char*>(operands.out) +
        ((block.expert * problem.n + block.first_row) * operands.out_stride + block.first_col) *
            out_element;
    const std::int64_t begin = locator.begin(block.expert);
    const std::int64_t end = begin + locator.size(block.expert);
    Scratch& scratch = Scratch::of_this_thread();
    scratch.reserve(scratch_bytes);
    const void** dy = scratch.take<const void*>(kChunkRows);
    const void** x = scratch.take<const void*>(kChunkRows);
    float* router_weights = scratch.take<float>(kChunkRows);
    DwTask task;
    task.dy = dy;
    task.x = x;
    task.router_weights = problem.multiply ? router_weights : nullptr;
    task.n_rows = block.rows;
    if (turn.next.has_cols_of(block) && turn.next.first_row == block.first_row + block.rows) {
      task.dy_cols_after = turn.next.rows;
    }
    task.cols = block.cols;
    task.first = true;
    task.out = out;
    task.out_stride = operands.out_stride;
    task.out_dtype = problem.out_dtype;
    task.accumulate = problem.accumulate;
    task.stream = stream;
    task.x_panels = scratch.take<std::uint32_t>(blocks.panel_words);
    task.dy_panels = scratch.take<std::uint32_t>(kChunkRows * kDyPanelCols);
    task.totals = scratch.take<float>(blocks.kept_sums);
    // Rows with a bad index contribute nothing: they are left out of the list.
    for (std::int64_t position = begin; position < end;) {
      task.rows = 0;
      for (; position < end && task.rows < kChunkRows; ++position) {
        const RowLocator::Row row = locator.locate(block.expert, position);
        if (row.source == nullptr) continue;
        dy[task.rows] = row.dy + block.first_row * in_element;
        x[task.rows] = row.source + block.first_col * in_element;
        router_weights[task.rows] = row.router_weight;
        ++task.rows;
      }
      task.last = position == end;
      task.x_is_packed = task.first && task.last && turn.previous.has_cols_of(block);
      if (task.rows == 0 && task.first) break;
      kernel(task);
      task.first = false;
    }
    if (task.first) clear_block(problem, operands, block, out);
  });
}

}  // namespace moegemm::cpu::simd
