#include "cpu/simd/work_list.h"

#include <algorithm>
#include <atomic>

#include "cpu/parallel.h"

namespace moegemm::cpu::simd {
namespace {

/// About 5 microseconds of arithmetic, what it takes to wake a thread.
constexpr double kOperationsPerWorker = 256 * 1024;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Every worker starts with a stretch of the list of its own, in which neighbours share what it has
/// packed or fetched; when that is done, it helps with the stretch of the next worker.
class Stretches {
 public:
  Stretches(std::int64_t total, int workers) : total_(total), stretches_(workers) {
    for (int w = 0; w < workers; ++w) {
      stretches_[w].next.store(total * w / workers, std::memory_order_relaxed);
      stretches_[w].end = total * (w + 1) / workers;
    }
  }

  /// The next index for a worker that is at stretch `at`; the total when all are done.
  std::int64_t take(std::size_t& at) {
    for (std::size_t tried = 0; tried < stretches_.size(); ++tried) {
      Stretch& stretch = stretches_[at];
      const std::int64_t index = stretch.next.fetch_add(1, std::memory_order_relaxed);
      if (index < stretch.end) return index;
      at = (at + 1) % stretches_.size();
    }
    return total_;
  }

 private:
  struct alignas(64) Stretch {
    std::atomic<std::int64_t> next = 0;
    std::int64_t end = 0;
  };
  std::int64_t total_;
  std::vector<Stretch> stretches_;
};

}  // namespace

int worthwhile_workers(const ExecutionContext& context, double operations) {
  // Do not even ask for the threads when the work is for one of them.
  if (operations < kOperationsPerWorker) return 1;
  const int concurrency = executor_of(context).concurrency();
  return static_cast<int>(std::min<double>(concurrency, 1 + operations / kOperationsPerWorker));
}

void WorkList::add(std::int64_t expert, std::int64_t rows, std::int64_t cols, std::int64_t max_rows,
                   std::int64_t max_cols, std::int64_t col_unit, std::int64_t row_unit) {
  if (rows <= 0 || cols <= 0) return;
  const auto blocks = [](std::int64_t extent, std::int64_t unit, std::int64_t most) {
    return ceil_div(ceil_div(extent, unit), std::max<std::int64_t>(1, most / unit));
  };
  const Entry entry{.expert = expert,
                    .first_block = total_,
                    .rows = rows,
                    .row_unit = row_unit,
                    .row_blocks = blocks(rows, row_unit, max_rows),
                    .cols = cols,
                    .col_unit = col_unit,
                    .col_blocks = blocks(cols, col_unit, max_cols)};
  total_ += entry.row_blocks * entry.col_blocks;
  entries_.push_back(entry);
}

Block WorkList::block(std::int64_t index) const {
  if (index >= total_) return {};
  const auto after = std::upper_bound(
      entries_.begin(), entries_.end(), index,
      [](std::int64_t value, const Entry& entry) { return value < entry.first_block; });
  const Entry& entry = *(after - 1);
  const std::int64_t local = index - entry.first_block;
  const bool columns_first = order_ == Order::kColumnsFirst;
  const std::int64_t r = columns_first ? local / entry.col_blocks : local % entry.row_blocks;
  const std::int64_t c = columns_first ? local % entry.col_blocks : local / entry.row_blocks;
  // Where the i-th of so many blocks begins, in whole units; after the last one is the end.
  const auto border = [](std::int64_t i, std::int64_t blocks, std::int64_t extent,
                         std::int64_t unit) {
    return std::min(i * ceil_div(extent, unit) / blocks * unit, extent);
  };
  Block block;
  block.expert = entry.expert;
  block.first_row = border(r, entry.row_blocks, entry.rows, entry.row_unit);
  block.rows = border(r + 1, entry.row_blocks, entry.rows, entry.row_unit) - block.first_row;
  block.first_col = border(c, entry.col_blocks, entry.cols, entry.col_unit);
  block.cols = border(c + 1, entry.col_blocks, entry.cols, entry.col_unit) - block.first_col;
  return block;
}

void WorkList::run(const ExecutionContext& context, double operations,
                   const std::function<void(const Turn&)>& body) const {
  if (total_ == 0) return;
  const int workers =
      static_cast<int>(std::min<std::int64_t>(total_, worthwhile_workers(context, operations)));
  const auto take_turns = [&](const auto& take) {
    Turn turn;
    turn.next = block(take());
    while (turn.next.expert >= 0) {
      turn.previous = turn.block;
      turn.block = turn.next;
      turn.next = block(take());
      body(turn);
    }
  };
  if (workers == 1) {
    std::int64_t index = 0;
    return take_turns([&] { return index++; });
  }
  Stretches stretches(total_, workers);
  executor_of(context).run(workers, [&](int worker) {
    std::size_t at = static_cast<std::size_t>(worker);
    take_turns([&] { return stretches.take(at); });
  });
}

}  // namespace moegemm::cpu::simd
