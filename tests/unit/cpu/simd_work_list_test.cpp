#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>

#include "cpu/simd/work_list.h"

namespace moegemm::cpu::simd {
namespace {

class WorkListOrder : public ::testing::TestWithParam<WorkList::Order> {};

/// Two experts, of `rows` rows and of one more, in blocks that keep to the limits and units and lie
/// beside each other.
void expect_covered_once(WorkList::Order order, std::int64_t rows, std::int64_t cols,
                         std::int64_t max_rows, std::int64_t max_cols, std::int64_t row_unit) {
  WorkList work(order);
  work.add(3, rows, cols, max_rows, max_cols, 32, row_unit);
  work.add(5, rows + 1, cols, max_rows, max_cols, 32, row_unit);
  std::map<std::int64_t, std::int64_t> area;
  std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> corners;
  for (std::int64_t i = 0; i < work.size(); ++i) {
    const Block block = work.block(i);
    ASSERT_GT(block.rows, 0);
    ASSERT_GT(block.cols, 0);
    ASSERT_LE(block.rows, std::max(max_rows, row_unit));
    ASSERT_LE(block.cols, std::max<std::int64_t>(max_cols, 32));
    ASSERT_EQ(block.first_row % row_unit, 0);
    ASSERT_EQ(block.first_col % 32, 0);
    ASSERT_LE(block.first_row + block.rows, block.expert == 3 ? rows : rows + 1);
    ASSERT_LE(block.first_col + block.cols, cols);
    ASSERT_TRUE(corners.insert({block.expert, block.first_row, block.first_col}).second);
    area[block.expert] += block.rows * block.cols;
  }
  EXPECT_EQ(area[3], rows * cols);
  EXPECT_EQ(area[5], (rows + 1) * cols);
}

TEST_P(WorkListOrder, CoversEveryRowAndColumnOfEveryExpertOnce) {
  for (std::int64_t rows : {0, 1, 5, 100, 513}) {
    for (std::int64_t cols : {1, 31, 64, 1000}) {
      for (std::int64_t max_rows : {1, 7, 132, 512}) {
        for (std::int64_t max_cols : {32, 100, 4096}) {
          for (std::int64_t row_unit : {1, 3, 6}) {
            expect_covered_once(GetParam(), rows, cols, max_rows, max_cols, row_unit);
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, WorkListOrder,
                         ::testing::Values(WorkList::Order::kColumnsFirst,
                                           WorkList::Order::kRowsFirst),
                         [](const auto& each) {
                           return each.param == WorkList::Order::kRowsFirst ? "RowsFirst"
                                                                            : "ColumnsFirst";
                         });

TEST(WorkList, NeighboursShareTheOtherExtent) {
  for (WorkList::Order order : {WorkList::Order::kColumnsFirst, WorkList::Order::kRowsFirst}) {
    WorkList work(order);
    work.add(2, 40, 128, 10, 32, 32);
    for (std::int64_t i = 0; i + 1 < work.size(); ++i) {
      const bool columns_first = order == WorkList::Order::kColumnsFirst;
      const Block a = work.block(i);
      const Block b = work.block(i + 1);
      const bool share = columns_first ? a.has_rows_of(b) : a.has_cols_of(b);
      EXPECT_EQ(share, (i + 1) % 4 != 0) << i;
    }
  }
}

TEST(WorkList, HandsOutEveryBlockOnceAndNamesItsNeighboursInTheWorker) {
  WorkList work;
  work.add(0, 100, 640, 10, 64, 32);
  std::mutex mutex;
  std::multiset<std::int64_t> seen;
  std::map<std::thread::id, WorkList::Turn> previous;
  work.run({}, 1e12, [&](const WorkList::Turn& turn) {
    const std::lock_guard lock(mutex);
    seen.insert(turn.block.first_row * 640 + turn.block.first_col);
    EXPECT_TRUE(turn.next.expert == -1 || turn.next.expert == 0);
    const auto same = [](const Block& a, const Block& b) {
      return a.has_rows_of(b) && a.first_col == b.first_col && a.cols == b.cols;
    };
    const auto [announced, first] = previous.try_emplace(std::this_thread::get_id(), turn);
    if (first) {
      EXPECT_EQ(turn.previous.expert, -1);
    } else {
      EXPECT_TRUE(same(turn.previous, announced->second.block));
      EXPECT_TRUE(same(turn.block, announced->second.next));
      announced->second = turn;
    }
  });
  EXPECT_EQ(static_cast<std::int64_t>(seen.size()), work.size());
  EXPECT_EQ(std::set<std::int64_t>(seen.begin(), seen.end()).size(), seen.size());
}

TEST(WorkList, AnEmptyListCallsNobody) {
  WorkList work;
  work.add(0, 0, 64, 8, 64, 32);
  work.run({}, 1e12, [](const WorkList::Turn&) { FAIL(); });
}

}  // namespace
}  // namespace moegemm::cpu::simd
