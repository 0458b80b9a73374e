#include "cuda/backend/tile_slots.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>
#include <vector>

namespace moegemm::cuda {
namespace {

TEST(TileSlots, AStreamKeepsItsSlotAndSharesItWithNoOther) {
  TileSlots slots;
  const auto first = slots.for_stream(7), second = slots.for_stream(1ull << 63);
  ASSERT_TRUE(first && second);
  EXPECT_NE(*first, *second);
  EXPECT_EQ(slots.for_stream(7), first);
  EXPECT_EQ(slots.for_stream(1ull << 63), second);
}

TEST(TileSlots, StreamsBeyondTheRegionGetNoneAndEarlierOnesKeepTheirs) {
  TileSlots slots;
  std::set<int> seen;
  for (std::uint64_t id = 0; id < TileSlots::kStreamSlots; ++id) {
    const auto slot = slots.for_stream(id);
    ASSERT_TRUE(slot);
    EXPECT_GE(*slot, 0);
    EXPECT_LT(*slot, TileSlots::kStreamSlots);
    seen.insert(*slot);
  }
  EXPECT_EQ(seen.size(), TileSlots::kStreamSlots);
  EXPECT_FALSE(slots.for_stream(TileSlots::kStreamSlots));
  EXPECT_TRUE(slots.for_stream(0));
}

TEST(TileSlots, CapturedLaunchesNeverShareWhateverThreadTheyComeFrom) {
  TileSlots slots;
  constexpr int kThreads = 4;
  std::vector<std::vector<int>> taken(kThreads);
  std::vector<std::thread> threads;
  for (auto& mine : taken) {
    threads.emplace_back([&] {
      while (const auto slot = slots.for_captured_launch()) mine.push_back(*slot);
    });
  }
  for (auto& thread : threads) thread.join();
  std::vector<bool> seen(TileSlots::kSlots, false);
  int count = 0;
  for (const auto& mine : taken) {
    for (const int slot : mine) {
      ASSERT_GE(slot, TileSlots::kStreamSlots);
      ASSERT_LT(slot, TileSlots::kSlots);
      EXPECT_FALSE(seen[slot]);
      seen[slot] = true;
      ++count;
    }
  }
  EXPECT_EQ(count, TileSlots::kCaptureSlots);
  EXPECT_FALSE(slots.for_captured_launch());
  EXPECT_TRUE(slots.for_stream(1)) << "eager launches have their own region";
}

TEST(TileSlots, ThreadsThatShareAStreamAgreeOnItsSlot) {
  TileSlots slots;
  std::vector<std::vector<int>> found(4, std::vector<int>(1000));
  std::vector<std::thread> threads;
  for (auto& mine : found) {
    threads.emplace_back([&] {
      for (std::uint64_t id = 0; id < mine.size(); ++id) mine[id] = slots.for_stream(id).value();
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& mine : found) EXPECT_EQ(mine, found[0]);
}

}  // namespace
}  // namespace moegemm::cuda
