#include "cuda/sm80/row_gemm/pieces.h"

#include <cuda_bf16.h>
#include <gtest/gtest.h>

#include <set>
#include <utility>

/// How packed weights lie in a stage until they are decoded there.
namespace moegemm::cuda::sm80 {
namespace {

template <typename Shape, Major Weights, int Bits>
using PiecesOf = Pieces<GemmTraits<Shape, __nv_bfloat16, Math::kTensor16, Major::kDepth, Weights,
                                   Loads::kVectors, true>,
                        Bits>;
using Large = BlockShape<128, 256, 128, 4, 2, 4, 1, 1, 4>;
using Short = BlockShape<128, 128, 64, 4, 2, 2, 2, 2>;
using Few = BlockShape<16, 128, 128, 4, 1, 4, 3>;

template <typename P>
class PiecesTest : public testing::Test {};
using AllPieces =
    testing::Types<PiecesOf<Large, Major::kDepth, 4>, PiecesOf<Large, Major::kDepth, 8>,
                   PiecesOf<Large, Major::kOuter, 4>, PiecesOf<Large, Major::kOuter, 8>,
                   PiecesOf<Short, Major::kDepth, 4>, PiecesOf<Short, Major::kDepth, 8>,
                   PiecesOf<Short, Major::kOuter, 4>, PiecesOf<Short, Major::kOuter, 8>,
                   PiecesOf<Few, Major::kDepth, 4>, PiecesOf<Few, Major::kDepth, 8>,
                   PiecesOf<Few, Major::kOuter, 4>, PiecesOf<Few, Major::kOuter, 8>>;
TYPED_TEST_SUITE(PiecesTest, AllPieces);

template <typename P>
int offset(int thread, int pass, int chunk) {
  return (P::first(thread) ^ P::chunk(chunk)) + P::pass(pass);
}

TYPED_TEST(PiecesTest, EveryWeightOfAStageHasOneThread) {
  using P = TypeParam;
  std::set<std::pair<int, int>> seen;
  for (int thread = 0; thread < P::Shape::kCopyThreads; ++thread) {
    for (int pass = 0; pass < P::kPasses; ++pass) {
      const int row = P::row(thread) + pass * P::kRowsAtOnce;
      ASSERT_TRUE(row < P::kRows && P::piece(thread) < P::kRowPieces);
      ASSERT_TRUE(seen.insert({row, P::piece(thread)}).second);
    }
  }
  EXPECT_EQ(static_cast<int>(seen.size()), P::kRows * P::kRowPieces);
}

/// Whoever reads the stage finds plain weights.
TYPED_TEST(PiecesTest, ChunksLieWherePlainWeightsDo) {
  using P = TypeParam;
  using Shape = typename P::Shape;
  std::set<int> taken;
  for (int thread = 0; thread < Shape::kCopyThreads; ++thread) {
    for (int pass = 0; pass < P::kPasses; ++pass) {
      const int row = P::row(thread) + pass * P::kRowsAtOnce;
      for (int j = 0; j < P::kChunks; ++j) {
        const int chunk = P::piece(thread) * P::kChunks + j;
        const int plain = P::kDepthMajor ? depth_major_offset<Shape::kDepthBytes>(row, chunk)
                                         : outer_major_offset<Shape::kCols * 2, 2>(row, chunk);
        ASSERT_EQ(offset<P>(thread, pass, j), plain);
        ASSERT_TRUE(taken.insert(plain).second);
      }
    }
  }
  EXPECT_EQ(static_cast<int>(taken.size()), Shape::kCols * Shape::kDepthBytes / kChunkBytes);
}

TYPED_TEST(PiecesTest, EightThreadsTouchAllBanksAndSoDoTheScalesOfAWarp) {
  using P = TypeParam;
  for (int first = 0; first < P::Shape::kCopyThreads; first += 8) {
    for (int j = 0; j < P::kChunks; ++j) {
      std::set<int> banks;
      for (int i = 0; i < 8; ++i) banks.insert(offset<P>(first + i, 0, j) % 128);
      EXPECT_EQ(banks.size(), 8u) << "threads from " << first << " on, chunk " << j;
    }
  }
  for (int first = 0; first < P::Shape::kCopyThreads; first += 32) {
    std::set<int> banks;
    for (int i = first; i < first + 32; ++i) {
      banks.insert((offset<P>(i, 0, 1) + P::scale_word(i)) % 128);
    }
    EXPECT_EQ(banks.size(), 32u) << "threads from " << first << " on";
  }
}

}  // namespace
}  // namespace moegemm::cuda::sm80
