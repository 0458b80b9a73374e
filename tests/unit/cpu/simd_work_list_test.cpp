#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "cpu/simd/work_list.h"

namespace moegemm::cpu::simd {
namespace {

TEST(WorkList, CoversEveryRowAndColumnOfEveryExpertOnce) {
  for (std::int64_t rows : {0, 1, 5, 100, 513}) {
    for (std::int64_t cols : {1, 31, 64, 1000}) {
      for (std::int64_t max_rows : {1, 7, 512}) {
        for (std::int64_t max_cols : {32, 100, 4096}) {
          WorkList work;
          work.add(3, rows, cols, max_rows, max_cols, 32);
          work.add(5, rows + 1, cols, max_rows, max_cols, 32);
          std::map<std::int64_t, std::int64_t> area;
          std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> corners;
          for (std::int64_t i = 0; i < work.size(); ++i) {
            const Block block = work.block(i);
            ASSERT_GT(block.rows, 0);
            ASSERT_GT(block.cols, 0);
            ASSERT_LE(block.rows, max_rows);
            ASSERT_LE(block.cols, std::max<std::int64_t>(max_cols, 32));
            ASSERT_EQ(block.first_col % 32, 0);
            ASSERT_LE(block.first_row + block.rows, block.expert == 3 ? rows : rows + 1);
            ASSERT_LE(block.first_col + block.cols, cols);
            ASSERT_TRUE(corners.insert({block.expert, block.first_row, block.first_col}).second);
            area[block.expert] += block.rows * block.cols;
          }
          EXPECT_EQ(area[3], rows * cols);
          EXPECT_EQ(area[5], (rows + 1) * cols);
        }
      }
    }
  }
}

TEST(WorkList, HandsOutEveryBlockOnceAndNamesTheNextOneOfTheWorker) {
  WorkList work;
  work.add(0, 100, 640, 10, 64, 32);
  std::mutex mutex;
  std::multiset<std::int64_t> seen;
  work.run({}, 1e12, [&](const Block& block, const Block& next) {
    const std::lock_guard lock(mutex);
    seen.insert(block.first_row * 640 + block.first_col);
    EXPECT_TRUE(next.expert == -1 || next.expert == 0);
  });
  EXPECT_EQ(static_cast<std::int64_t>(seen.size()), work.size());
  EXPECT_EQ(std::set<std::int64_t>(seen.begin(), seen.end()).size(), seen.size());
}

TEST(WorkList, AnEmptyListCallsNobody) {
  WorkList work;
  work.add(0, 0, 64, 8, 64, 32);
  work.run({}, 1e12, [](const Block&, const Block&) { FAIL(); });
}

}  // namespace
}  // namespace moegemm::cpu::simd
