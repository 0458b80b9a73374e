#include "cpu/simd/rows/row_block.h"

#include <algorithm>
#include <cstring>

#include "cpu/element_type.h"
#include "cpu/parallel.h"

namespace moegemm::cpu::simd {

RowBlock::RowBlock(const RowLocator& locator, const Problem& problem, const Operands& operands,
                   const Block& block, const void* stand_in, Scratch& scratch)
    : locator_(locator),
      problem_(problem),
      operands_(operands),
      block_(block),
      first_position_(locator.begin(block.expert) + block.first_row),
      sources_(scratch.take<const void*>(block.rows)),
      low_rows_(problem.low_rank > 0 ? scratch.take<const void*>(block.rows) : nullptr),
      destinations_(scratch.take<void*>(block.rows)),
      router_weights_(problem.multiply ? scratch.take<float>(block.rows) : nullptr),
      bias_(problem.bias ? scratch.take<float>(block.cols + kMaxLanes) : nullptr) {
  for (std::int64_t c = 0; bias_ != nullptr && c < block.cols + kMaxLanes; ++c) {
    bias_[c] = c < block.cols
                   ? read_float(operands.bias, problem.dtype,
                                block.expert * operands.bias_stride + block.first_col + c)
                   : 0.0f;
  }
  for (std::int64_t i = 0; i < block.rows; ++i) {
    const RowLocator::Row row = locator.locate(block.expert, first_position_ + i);
    sources_[i] = row.source != nullptr ? row.source : stand_in;
    destinations_[i] = row.destination;
    if (router_weights_ != nullptr) router_weights_[i] = row.router_weight;
    has_zero_rows_ |= row.source == nullptr && low_rows_ == nullptr;
  }
  const std::int64_t pitch = operands.low_rows_stride * size_bytes(problem.dtype);
  for (std::int64_t i = 0; low_rows_ != nullptr && i < block.rows; ++i) {
    low_rows_[i] = static_cast<const char*>(operands.low_rows) + (first_position_ + i) * pitch;
  }
}

LowRankPart RowBlock::low_rank_part() const {
  if (low_rows_ == nullptr) return {};
  const bool forward = problem_.op == Op::kForward;
  const std::int64_t row =
      forward ? block_.expert * problem_.n + block_.first_col : block_.expert * problem_.low_rank;
  const std::int64_t at = row * operands_.low_weights_stride + (forward ? 0 : block_.first_col);
  return {low_rows_,
          static_cast<const char*>(operands_.low_weights) + at * size_bytes(problem_.dtype),
          operands_.low_weights_stride, problem_.low_rank};
}

std::vector<char> zero_source(const Problem& problem, std::int64_t depth) {
  const bool needed = problem.low_rank > 0 || !problem.quantization.plain();
  return std::vector<char>(needed ? static_cast<std::size_t>(depth * size_bytes(problem.dtype))
                                  : 0);
}

OutputRows RowBlock::output() const {
  return {destinations_, router_weights_, block_.first_col, problem_.out_dtype, bias_};
}

void RowBlock::clear_zero_rows() const {
  if (!has_zero_rows_) return;
  const std::int64_t element = size_bytes(problem_.out_dtype);
  for (std::int64_t i = 0; i < block_.rows; ++i) {
    if (destinations_[i] == nullptr ||
        locator_.locate(block_.expert, first_position_ + i).source != nullptr) {
      continue;
    }
    if (bias_ == nullptr) {
      std::memset(static_cast<char*>(destinations_[i]) + block_.first_col * element, 0,
                  block_.cols * element);
      continue;
    }
    for (std::int64_t c = 0; c < block_.cols; ++c) {
      write_float(destinations_[i], problem_.out_dtype, block_.first_col + c, bias_[c]);
    }
  }
}

void clear_unwritten_rows(const RowLocator& locator, const Problem& problem,
                          const ExecutionContext& context) {
  const std::int64_t cols = problem.output_columns();
  const std::int64_t row_bytes = cols * size_bytes(problem.out_dtype);
  // 1 MiB per worker at least: less is written before another thread wakes up.
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 20) / row_bytes);
  for_each_range(context, locator.unwritten_rows(), grain,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t i = begin; i < end; ++i) {
                     std::memset(locator.unwritten_row(i), 0, row_bytes);
                   }
                 });
}

std::int64_t balanced_share(std::int64_t total, int workers, int turns) {
  return std::max<std::int64_t>(1, total / (std::int64_t{turns} * workers));
}

}  // namespace moegemm::cpu::simd
