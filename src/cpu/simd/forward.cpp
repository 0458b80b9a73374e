#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/simd/drivers.h"
#include "cpu/simd/memory/output_pages.h"
#include "cpu/simd/packed_weights.h"
#include "cpu/simd/rows/row_block.h"

namespace moegemm::cpu::simd {
namespace {

/// The X rows of a block stay in L2 while its weights pass by.
constexpr std::int64_t kRowBlockBytes = 256 * 1024;
/// Longer rows than make a smallest block of this are read in place.
constexpr std::int64_t kMaxPackedBytes = 768 * 1024;
/// Fewer rows than this would make the weights pass by too often.
constexpr std::int64_t kMinRowBlock = 48;
/// The same where a copy of fp32 numbers spares the tiles from converting them, and this many are
/// all that fits.
constexpr std::int64_t kMinWidenedBlock = 24;
/// Weight rows of a block: each is read once per block, so this only sets how often workers meet.
constexpr std::int64_t kMinWeightRows = 64;
constexpr std::int64_t kMaxWeightRows = 256;

/// In whole tiles: one of five rows takes nearly as long as one of six.
std::int64_t most_rows_of_block(std::int64_t row_bytes, std::int64_t tile_rows,
                                std::int64_t min_rows) {
  const std::int64_t rows =
      std::clamp(kRowBlockBytes / row_bytes, min_rows, RowBlock::kMaxRows - tile_rows + 1);
  return (rows + tile_rows - 1) / tile_rows * tile_rows;
}

std::int64_t least_rows_of_block(const DTypeKernels& typed, std::int64_t element_bytes,
                                 std::int64_t packed_row_bytes) {
  const bool widens = typed.packed_x_bytes > element_bytes;
  return widens && kMinRowBlock * packed_row_bytes > kMaxPackedBytes ? kMinWidenedBlock
                                                                     : kMinRowBlock;
}

WorkList blocks_of(const Problem& problem, const RowLocator& locator, std::int64_t max_rows,
                   std::int64_t share, std::int64_t tile_rows,
                   std::int64_t& rows_of_largest_block) {
  WorkList work;
  work.reserve(problem.experts);
  for (std::int64_t e = 0; e < problem.experts; ++e) {
    const std::int64_t rows = std::min(locator.size(e), max_rows);
    rows_of_largest_block = std::max(rows_of_largest_block, rows);
    const std::int64_t weight_rows = std::clamp(share / (rows + 6), kMinWeightRows, kMaxWeightRows);
    work.add(e, locator.size(e), problem.n, max_rows, weight_rows, kStagedCols, tile_rows);
  }
  return work;
}

}  // namespace

void run_forward(const KernelTable& kernels, const Problem& problem, const Operands& operands,
                 const ExecutionContext& context) {
  if (problem.output_rows() == 0) return;
  const std::int64_t element = size_bytes(problem.dtype);
  // Nobody needs memory under a tail that is left alone.
  if (problem.tails == Tails::kZero) prepare_output_pages(output_span(problem, operands), context);
  const RowLocator locator(problem, operands);
  const std::int64_t tile_rows = kernels.dot_rows;
  const DTypeKernels& typed = kernels_for(kernels, problem.dtype);
  const std::int64_t packed_row_bytes =
      (problem.k + typed.dot_step - 1) / typed.dot_step * typed.dot_step * typed.packed_x_bytes;
  const std::int64_t least_rows = least_rows_of_block(typed, element, packed_row_bytes);
  const std::int64_t max_rows =
      most_rows_of_block(problem.k * typed.packed_x_bytes, tile_rows, least_rows);
  const std::int64_t cost = locator.cost();
  const double operations = static_cast<double>(cost) * problem.n * problem.k;
  const int workers = worthwhile_workers(context, operations);
  const std::int64_t share =
      workers == 1 ? cost * problem.n : balanced_share(cost * problem.n, workers);
  std::int64_t rows_of_largest_block = 0;
  const WorkList work =
      blocks_of(problem, locator, max_rows, share, tile_rows, rows_of_largest_block);
  const bool packs = rows_of_largest_block >= typed.min_packed_x &&
                     rows_of_largest_block * packed_row_bytes <= kMaxPackedBytes;
  const std::int64_t packed_bytes = packs ? rows_of_largest_block * packed_row_bytes : 0;
  const auto weights_of = [&](const Block& block) {
    return static_cast<const char*>(operands.w) +
           (block.expert * problem.n + block.first_col) * operands.w_stride * element;
  };
  const bool decodes = !problem.quantization.plain();
  const std::int64_t decoded_bytes = decodes ? forward_decoded_elems(problem.k) * element +
                                                   kWidenedFloats * std::int64_t{sizeof(float)}
                                             : 0;
  const std::vector<char> zeros = zero_source(problem, problem.k);
  const std::int64_t parked = kParkedFloatsPerRow * rows_of_largest_block;
  const std::int64_t scratch_bytes =
      RowBlock::scratch_bytes(rows_of_largest_block, kMaxWeightRows) +
      Scratch::bytes_of<float>(parked) +
      Scratch::bytes_of<float>(kStagedCols * rows_of_largest_block) +
      Scratch::bytes_of<std::byte>(packed_bytes) + Scratch::bytes_of<std::byte>(decoded_bytes);
  work.run(context, operations, [&](const WorkList::Turn& turn) {
    const Block& block = turn.block;
    Scratch& scratch = Scratch::of_this_thread();
    scratch.reserve(scratch_bytes);
    std::byte* const packed = scratch.take<std::byte>(packed_bytes);
    const void* stand_in = zeros.empty() ? weights_of(block) : zeros.data();
    const RowBlock rows(locator, problem, operands, block, stand_in, scratch);
    ForwardTask task;
    task.x = rows.sources();
    task.rows = block.rows;
    PackedWeights packed_w;
    static_cast<WeightBlock&>(task) =
        weight_block(problem, operands, block, decodes ? nullptr : weights_of(block), packed_w,
                     scratch.take<std::byte>(decoded_bytes));
    task.w_rows = block.cols;
    task.k = problem.k;
    task.low = rows.low_rank_part();
    task.out = rows.output();
    if (packs && block.rows >= typed.min_packed_x) {
      task.packed_x = packed;
      if (!turn.previous.has_rows_of(block)) {
        typed.pack_x(task.x, block.rows, problem.k, packed);
      }
    }
    if (turn.next.expert >= 0 && !decodes) {
      task.next_w = weights_of(turn.next);
      task.next_w_rows = turn.next.cols;
    }
    task.parked = scratch.take<float>(parked);
    task.staged = scratch.take<float>(kStagedCols * rows_of_largest_block);
    typed.forward(task);
    rows.clear_zero_rows();
  });
  clear_unwritten_rows(locator, problem, context);
}

}  // namespace moegemm::cpu::simd
