#include "cuda/sm90/row_gemm/traits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>

#include "cuda/device/swizzle.h"

namespace moegemm::cuda {
namespace {

TEST(Swizzle, IsAPermutationOfTheChunksOfATile) {
  std::set<int> offsets;
  for (int row = 0; row < 64; ++row) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      const int offset = swizzle_128b(row, chunk);
      EXPECT_EQ(offset / 128, row);
      EXPECT_EQ(offset % 16, 0);
      offsets.insert(offset);
    }
  }
  EXPECT_EQ(offsets.size(), 64u * 8);
}

TEST(Swizzle, EightRowsOfOneChunkFallIntoDifferentBanks) {
  for (int chunk = 0; chunk < 8; ++chunk) {
    std::set<int> banks;
    for (int row = 0; row < 8; ++row) banks.insert(swizzle_128b(row, chunk) % 128 / 16);
    EXPECT_EQ(banks.size(), 8u);
  }
}

/// What must hold for every compiled tile.
template <typename Traits>
void check_tile() {
  using Layout = sm90::RowGemmLayout<Traits>;
  // Stages hold swizzled operands: every base is a multiple of 1024 bytes.
  EXPECT_EQ(Traits::kStageBytes % 1024, 0);
  EXPECT_EQ(Traits::kWeightBytes % 1024, 0);
  EXPECT_EQ(Layout::kStaging % 1024, 0);
  EXPECT_EQ(Layout::kRings % 8, 0);
  EXPECT_EQ(Layout::kTiles % 16, 0);
  for (int experts : {1, 2, 127, 128, 512}) {
    EXPECT_EQ(Layout::row_info(experts) % 8, 0);
    EXPECT_GE(Layout::total(experts, false), Layout::kStarts + (experts + 1) * 8);
    if (Traits::kStoresLater) {  // in the buffers that are then not in use
      EXPECT_LE(Layout::row_info(experts) + sm90::kTileSlots * Traits::kRows * 8, Layout::kDecode);
    } else {
      EXPECT_EQ(Layout::total(experts, false), Layout::row_info(experts));
    }
  }
  EXPECT_LE(Layout::total(128, false), sm90::kSharedMemoryLimit);
  // Tiles that stage all rows count on 1024 experts when they share out what is left.
  if (Traits::kStoresLater) {
    EXPECT_LE(Layout::total(1024, true) + 1024 * 4, sm90::kSharedMemoryLimit);
  }
  // Barriers: full and empty per stage and tile slot, and one per slot for the row info.
  EXPECT_LE(8 * (2 * Traits::kStages + 3 * sm90::kTileSlots), sm90::kRingBytes);
}

/// A box holds all columns that are multiplied, and is the lowest that does.
template <typename Traits>
void check_boxes() {
  EXPECT_EQ(Traits::box_rows(Traits::kBoxes - 1), Traits::kRows);
  for (int rows = 1; rows <= Traits::kRows; ++rows) {
    SCOPED_TRACE(rows);
    const int granules = (rows + Traits::kGranule - 1) / Traits::kGranule * Traits::kGranule;
    const int columns = std::max(granules, Traits::kMinColumns);
    const int box = Traits::box_of(rows);
    ASSERT_GE(box, 0);
    ASSERT_LT(box, Traits::kBoxes);
    EXPECT_GE(Traits::box_rows(box), columns);
    if (box > 0) {
      EXPECT_LT(Traits::box_rows(box - 1), columns);
    }
  }
}

/// Rows of a warpgroup's fragments are its 64 features, in some order.
template <typename Traits>
void check_features() {
  std::set<int> features;
  for (int warp = 0; warp < 4; ++warp) {
    for (int lane = 0; lane < 32; lane += 4) {
      const int first = Traits::feature_of(warp, lane, 0);
      EXPECT_EQ(Traits::feature_of(warp, lane, 1), first + Traits::kHalfStep);
      features.insert({first, first + Traits::kHalfStep});
    }
  }
  EXPECT_EQ(features.size(), 64u);
  EXPECT_EQ(*features.begin(), 0);
  EXPECT_EQ(*features.rbegin(), 63);
}

/// Calls check.operator()<Traits>() for every compiled kernel.
template <typename Check>
void for_every_compiled_kernel(const Check& check) {
  using sm90::RowGemm;
  using sm90::RowGemmTraits;
  using sm90::RowLoads;
  using sm90::Schedule;
#define MOEGEMM_ROW_GEMM(...) \
  check.template operator()<RowGemmTraits<RowGemm{__VA_ARGS__}, DType::kBFloat16, false>>();
#define MOEGEMM_QUANTISED_GEMM(...) MOEGEMM_ROW_GEMM(__VA_ARGS__)
#include "cuda/instances/sm90.inc"
}

TEST(RowGemmTraits, EveryCompiledTileFitsSharedMemoryAndAlignment) {
  for_every_compiled_kernel([]<typename Traits>() { check_tile<Traits>(); });
}

TEST(RowGemmTraits, EveryCompiledTileLoadsItsRowsInTheLowestBoxThatHoldsThem) {
  for_every_compiled_kernel([]<typename Traits>() { check_boxes<Traits>(); });
}

TEST(RowGemmTraits, TheFragmentsOfEveryCompiledTileHaveEachFeatureOnce) {
  for_every_compiled_kernel([]<typename Traits>() { check_features<Traits>(); });
}

}  // namespace
}  // namespace moegemm::cuda
