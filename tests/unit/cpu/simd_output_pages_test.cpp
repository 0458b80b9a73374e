#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "cpu/simd/memory/huge_page_record.h"
#include "cpu/simd/memory/output_pages.h"

namespace moegemm::cpu::simd {
namespace {

using namespace std::chrono_literals;

constexpr int kPages = 14;

void touch(HugePageRecord& record, int times, HugePageRecord::Clock::duration each) {
  for (int i = 0; i < times; ++i) record.touched(kPages, kPages * each);
}

TEST(HugePageRecord, AsksForHugePagesUntilManyInARowWereSlow) {
  HugePageRecord record;
  touch(record, HugePageRecord::kSlowInARow - 1, 4ms);
  EXPECT_TRUE(record.worthwhile(kPages));
  touch(record, 1, 4ms);
  EXPECT_FALSE(record.worthwhile(kPages));
}

TEST(HugePageRecord, FastPagesEndARowOfSlowOnes) {
  HugePageRecord record;
  touch(record, HugePageRecord::kSlowInARow - 1, 4ms);
  touch(record, 1, 170us);
  touch(record, HugePageRecord::kSlowInARow - 1, 4ms);
  EXPECT_TRUE(record.worthwhile(kPages));
}

TEST(HugePageRecord, PagesThatWereThereAlreadySayNothing) {
  HugePageRecord record;
  touch(record, HugePageRecord::kSlowInARow - 1, 4ms);
  touch(record, 3, 1us);
  touch(record, 1, 4ms);
  EXPECT_FALSE(record.worthwhile(kPages));
}

TEST(HugePageRecord, TriesAgainAfterAWhile) {
  HugePageRecord record;
  for (int time = 0; time < 2; ++time) {
    touch(record, HugePageRecord::kSlowInARow, 4ms);
    for (int i = 0; i < HugePageRecord::kFreshWithout; ++i) {
      EXPECT_FALSE(record.worthwhile(kPages));
      record.went_without(kPages);
    }
    EXPECT_TRUE(record.worthwhile(kPages));
  }
}

TEST(HugePageRecord, SizesAreApart) {
  HugePageRecord record;
  touch(record, HugePageRecord::kSlowInARow, 4ms);
  EXPECT_FALSE(record.worthwhile(kPages - 1));
  EXPECT_TRUE(record.worthwhile(2 * kPages));
  EXPECT_TRUE(record.worthwhile(kPages / 2));
}

TEST(OutputPages, KeepWhatIsInTheBuffer) {
  std::vector<char> buffer(std::size_t{9} << 20);
  for (std::size_t i = 0; i < buffer.size(); ++i) buffer[i] = static_cast<char>(i % 251);
  const std::vector<char> before = buffer;
  prepare_output_pages(buffer.data() + 1, static_cast<std::int64_t>(buffer.size()) - 1, {});
  EXPECT_TRUE(std::equal(before.begin(), before.end(), buffer.begin()));
}

}  // namespace
}  // namespace moegemm::cpu::simd
