#include "cuda/passes/routing/route_plan.h"

#include <gtest/gtest.h>

namespace moegemm::cuda {
namespace {

TEST(RoutePlan, BlocksAndWarpsCoverEveryRowOnce) {
  for (const std::int64_t experts : {1, 2, 8, 127, 128, 512, 1024, 4093, 4094, 5000, 100000}) {
    for (const std::int64_t rows :
         {0L, 1L, 31L, 3072L, 3073L, 8192L, 65536L, 65537L, 1000003L, 1L << 31}) {
      const RoutePlan plan = plan_route(rows, experts);
      SCOPED_TRACE(testing::Message() << "rows " << rows << ", experts " << experts);
      EXPECT_GE(plan.blocks * plan.chunk_rows, rows);
      EXPECT_TRUE(plan.blocks == 1 || (plan.blocks - 1) * plan.chunk_rows < rows);
      EXPECT_EQ(plan.chunk_rows % (32 * plan.ranking_warps), 0);
      EXPECT_GE(plan.ranking_warps, 1);
      EXPECT_LE(plan.ranking_warps, kRouteWarps);
      EXPECT_LE(plan.blocks, 2 * kRouteMaxBlocks);
      EXPECT_LT(plan.blocks * plan.chunk_rows + 64, std::int64_t{1} << 32) << "32-bit row numbers";
    }
  }
}

TEST(RoutePlan, SharedMemoryFitsEveryGpuFromSm80Up) {
  for (std::int64_t experts = 1; experts <= 6000; ++experts) {
    const RoutePlan plan = plan_route(100000, experts);
    if (plan.in_shared_memory) {
      EXPECT_LE(4 * plan.counters_per_block(), 99 * 1024 - 128) << experts;
    }
  }
  EXPECT_TRUE(plan_route(100000, 1024).in_shared_memory);
}

TEST(RoutePlan, FewRowsNeedOneLaunchAndNoWorkspace) {
  EXPECT_EQ(plan_route(512, 128).blocks, 1);
  EXPECT_EQ(plan_route(512, 128).workspace_bytes(), 0);
}

TEST(RoutePlan, VeryFewRowsOfAnyLayerFindTheirPositionsThemselves) {
  EXPECT_TRUE(plan_route(0, 8).few);
  EXPECT_TRUE(plan_route(kRouteFewRows, kRouteFewExperts).few);
  EXPECT_FALSE(plan_route(kRouteFewRows + 1, 8).few);
  EXPECT_FALSE(plan_route(8, kRouteFewExperts + 1).few);
}

TEST(RoutePlan, WorkspaceHoldsTheCountsOfEveryBlock) {
  const RoutePlan plan = plan_route(65536, 128);
  EXPECT_GT(plan.blocks, 1);
  EXPECT_EQ(plan.workspace_bytes(), 4 * plan.blocks * 129);
  const RoutePlan wide = plan_route(65536, 100000);
  EXPECT_FALSE(wide.in_shared_memory);
  EXPECT_GE(wide.workspace_bytes(), 4 * wide.blocks * wide.counters_per_block());
}

}  // namespace
}  // namespace moegemm::cuda
