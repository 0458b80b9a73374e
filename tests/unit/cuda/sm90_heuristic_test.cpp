#include <gtest/gtest.h>

#include "cuda/sm90/heuristic.h"

namespace moegemm::cuda::sm90 {
namespace {

KernelInfo row_kernel(Op op, int features, int rows) {
  KernelInfo info;
  info.op = op;
  info.tile = {rows, features, 64};
  return info;
}

Problem layer(Op op, std::int64_t experts, std::int64_t rows, std::int64_t n, std::int64_t k,
              Permutation permutation) {
  Problem problem;
  problem.op = op;
  problem.experts = experts;
  problem.rows = rows;
  problem.n = n;
  problem.k = k;
  problem.permutation = permutation;
  return problem;
}

int rank(const Problem& problem, int features, int rows) {
  return preference_rank(row_kernel(problem.op, features, rows), problem);
}

TEST(Sm90Heuristic, DecodeGetsTheWeightStreamingTile) {
  for (std::int64_t rows : {1, 8, 512, 64 * 128}) {
    EXPECT_EQ(rank(layer(Op::kForward, 128, rows, 1536, 2048, Permutation::kX), 128, 64), 0);
    EXPECT_EQ(rank(layer(Op::kDx, 128, rows, 1536, 2048, Permutation::kX), 128, 64), 0);
  }
}

TEST(Sm90Heuristic, GatheredForwardWithManyRowsGetsTheWidestTile) {
  EXPECT_EQ(rank(layer(Op::kForward, 128, 65536, 1536, 2048, Permutation::kX), 256, 160), 0);
}

TEST(Sm90Heuristic, ShortDepthGetsThePingpongTile) {
  EXPECT_EQ(rank(layer(Op::kForward, 128, 65536, 2048, 768, Permutation::kY), 128, 192), 0);
  EXPECT_EQ(rank(layer(Op::kForward, 512, 81920, 2048, 512, Permutation::kY), 128, 192), 0);
}

TEST(Sm90Heuristic, TwoTilesOf128RowsWasteLessThanTwoOf192) {
  EXPECT_EQ(rank(layer(Op::kDx, 128, 32768, 5760, 2880, Permutation::kX), 192, 128), 0);
}

TEST(Sm90Heuristic, EveryRowCountRanksEveryTileOfItsOp) {
  for (std::int64_t rows = 1; rows <= 1 << 20; rows *= 2) {
    const Problem problem = layer(Op::kDx, 128, rows, 2048, 2048, Permutation::kX);
    EXPECT_LT(rank(problem, 256, 192), 4);
    EXPECT_LT(rank(problem, 128, 192), 4);
    EXPECT_LT(rank(problem, 192, 128), 4);
    EXPECT_LT(rank(problem, 128, 64), 4);
  }
}

}  // namespace
}  // namespace moegemm::cuda::sm90
