#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "moegemm/ops.h"

namespace moegemm::cpu::simd {

/// A rectangle of one expert's output: `rows` of its segment (of N for dW) by `cols`.
struct Block {
  std::int64_t expert = -1;  ///< -1: none
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
  std::int64_t first_col = 0;
  std::int64_t cols = 0;

  /// Both blocks span the same rows (columns) of the same expert.
  bool has_rows_of(const Block& other) const {
    return expert == other.expert && first_row == other.first_row && rows == other.rows;
  }
  bool has_cols_of(const Block& other) const {
    return expert == other.expert && first_col == other.first_col && cols == other.cols;
  }
};

/// How many workers of `context` are worth waking for about this many multiply-adds.
int worthwhile_workers(const ExecutionContext& context, double operations);

/// All blocks of all experts. Every worker gets an equal stretch of them and then helps the others:
/// an expert with most of the rows is shared by all. Blocks of one expert differ by at most one
/// unit in either extent.
class WorkList {
 public:
  /// In which direction a worker goes on through an expert: neighbours share the other extent.
  enum class Order { kColumnsFirst, kRowsFirst };

  explicit WorkList(Order order = Order::kColumnsFirst) : order_(order) {}

  /// Cuts `rows` x `cols` of an expert into blocks of at most max_rows x max_cols (or one unit,
  /// where that is more), whose columns start at multiples of col_unit and rows at multiples of
  /// row_unit.
  void add(std::int64_t expert, std::int64_t rows, std::int64_t cols, std::int64_t max_rows,
           std::int64_t max_cols, std::int64_t col_unit, std::int64_t row_unit = 1);

  /// Makes room for the entries of this many experts.
  void reserve(std::int64_t experts) { entries_.reserve(static_cast<std::size_t>(experts)); }

  std::int64_t size() const { return total_; }

  Block block(std::int64_t index) const;

  /// What a worker is asked to do, and its neighbours in the turns of the same worker: what it can
  /// fetch ahead, and what its scratch memory still holds.
  struct Turn {
    Block block;
    Block next;
    Block previous;
  };

  /// Calls body(turn) for every block on the workers of `context`. `operations` is about how many
  /// multiply-adds the whole list is worth: it keeps small problems on few workers.
  void run(const ExecutionContext& context, double operations,
           const std::function<void(const Turn& turn)>& body) const;

 private:
  struct Entry {
    std::int64_t expert;
    std::int64_t first_block;
    std::int64_t rows;
    std::int64_t row_unit;
    std::int64_t row_blocks;
    std::int64_t cols;
    std::int64_t col_unit;
    std::int64_t col_blocks;
  };
  Order order_;
  std::vector<Entry> entries_;
  std::int64_t total_ = 0;
};

}  // namespace moegemm::cpu::simd
