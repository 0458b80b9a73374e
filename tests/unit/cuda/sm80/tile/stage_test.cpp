#include "cuda/sm80/tile/stage.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <set>
#include <utility>
#include <vector>

/// The kernels' shared-memory maths on a model of ldmatrix: which element does each lane get?
namespace moegemm::cuda::sm80 {
namespace {

using Element = std::pair<int, int>;  // outer, depth

/// Contents of a stage by byte offset: the loaders' side.
template <int DepthBytes>
std::map<int, Element> depth_major_stage(int outer_count, int element_bytes) {
  std::map<int, Element> stage;
  const int per_chunk = kChunkBytes / element_bytes;
  for (int outer = 0; outer < outer_count; ++outer) {
    for (int chunk = 0; chunk < DepthBytes / kChunkBytes; ++chunk) {
      for (int i = 0; i < per_chunk; ++i) {
        stage[depth_major_offset<DepthBytes>(outer, chunk) + i * element_bytes] = {
            outer, chunk * per_chunk + i};
      }
    }
  }
  return stage;
}

template <int OuterBytes, int ElementBytes>
std::map<int, Element> outer_major_stage(int depth_count) {
  std::map<int, Element> stage;
  constexpr int kPerChunk = kChunkBytes / ElementBytes;
  for (int depth = 0; depth < depth_count; ++depth) {
    for (int chunk = 0; chunk < OuterBytes / kChunkBytes; ++chunk) {
      for (int i = 0; i < kPerChunk; ++i) {
        stage[outer_major_offset<OuterBytes, ElementBytes>(depth, chunk) + i * ElementBytes] = {
            chunk * kPerChunk + i, depth};
      }
    }
  }
  return stage;
}

/// What lane `lane` gets in register `matrix` of ldmatrix.x4, where `offset(l)` is the row that
/// lane l names: the elements of two bytes at (g, 2t) and (g, 2t + 1), or transposed.
template <typename Offset>
std::array<Element, 2> ldmatrix(const std::map<int, Element>& stage, const Offset& offset, int lane,
                                int matrix, bool transposed) {
  const int g = lane / 4;
  const int t = lane % 4;
  std::array<Element, 2> got;
  for (int i = 0; i < 2; ++i) {
    const int row = transposed ? 2 * t + i : g;
    const int column = transposed ? g : 2 * t + i;
    got[i] = stage.at(offset(matrix * 8 + row) + column * 2);
  }
  return got;
}

/// Eight rows that one matrix of ldmatrix reads must lie in eight different groups of four banks.
template <typename Offset>
void expect_no_bank_conflict(const Offset& offset) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    std::set<int> groups;
    for (int row = 0; row < 8; ++row) groups.insert(offset(matrix * 8 + row) / 16 % 8);
    EXPECT_EQ(groups.size(), 8u) << "matrix " << matrix;
  }
}

/// Step `step` of a block whose first row of A and column of B is `first`, read by ldmatrix.x4 with
/// the offsets `a` and `b`, is what mma.m16n8k16 takes: a[r] is row g + 8 (r % 2), depths
/// 2t + 8 (r / 2) and the next; registers 2 c + r of B are column g + 8 c, depths 2t + 8 r.
template <typename OffsetA, typename OffsetB>
void expect_fragments(const std::map<int, Element>& stage, const OffsetA& a, const OffsetB& b,
                      int first, int step, bool transposed) {
  expect_no_bank_conflict(a);
  expect_no_bank_conflict(b);
  const auto expect_pair = [](const std::array<Element, 2>& got, int outer, int depth) {
    EXPECT_EQ(got[0], Element(outer, depth));
    EXPECT_EQ(got[1], Element(outer, depth + 1));
  };
  for (int lane = 0; lane < 32; ++lane) {
    const int outer = first + lane / 4;
    const int depth = step * 16 + lane % 4 * 2;
    for (int r = 0; r < 4; ++r) {
      const int low = r % 2 * 8, high = r / 2 * 8;
      expect_pair(ldmatrix(stage, a, lane, r, transposed), outer + low, depth + high);
      expect_pair(ldmatrix(stage, b, lane, r, transposed), outer + high, depth + low);
    }
  }
}

template <int DepthBytes>
void check_depth_major() {
  const auto stage = depth_major_stage<DepthBytes>(128, 2);
  ASSERT_EQ(stage.size(), 128u * DepthBytes / 2);  // no two elements share a place
  for (const int block : {0, 16, 48, 112}) {
    for (int step = 0; step < DepthBytes / 32; ++step) {
      const auto a = [&](int lane) {
        return ((a_depth_lane<DepthBytes>(lane) + depth_block<DepthBytes>(64)) ^ depth_step(step)) -
               depth_block<DepthBytes>(64) + depth_block<DepthBytes>(block);
      };
      const auto b = [&](int lane) {
        return (b_depth_lane<DepthBytes>(lane) ^ depth_step(step)) + depth_block<DepthBytes>(block);
      };
      expect_fragments(stage, a, b, block, step, false);
    }
  }
}

TEST(Sm80Stage, DepthMajorFragmentsAreThoseOfMmaSync) {
  check_depth_major<64>();
  check_depth_major<128>();
}

template <int OuterBytes>
void check_outer_major(int warp_outer) {
  constexpr int kOuter = OuterBytes / 2;
  const auto stage = outer_major_stage<OuterBytes, 2>(32);
  ASSERT_EQ(stage.size(), 32u * kOuter);
  for (int first = 0; first < kOuter; first += 16) {
    const int chunk = first / warp_outer * warp_outer / 8;
    const int block = first % warp_outer / 16;
    for (int step = 0; step < 2; ++step) {
      const int depth = step * 16 * OuterBytes;
      const auto a = [&](int lane) {
        return (a_outer_lane<OuterBytes>(lane, chunk) ^ outer_block(block)) + depth;
      };
      const auto b = [&](int lane) {
        return (b_outer_lane<OuterBytes>(lane, chunk) ^ outer_block(block)) + depth;
      };
      expect_fragments(stage, a, b, first, step, true);
    }
  }
}

TEST(Sm80Stage, OuterMajorFragmentsAreThoseOfMmaSync) {
  check_outer_major<256>(64);
  check_outer_major<512>(64);
  check_outer_major<256>(32);
  check_outer_major<128>(32);
}

template <int OuterBytes>
void check_words(int warp_outer) {
  constexpr int kOuter = OuterBytes / 4;
  const auto stage = outer_major_stage<OuterBytes, 4>(16);
  ASSERT_EQ(stage.size(), 16u * kOuter);
  for (int warp = 0; warp < kOuter / warp_outer; ++warp) {
    for (int block = 0; block < warp_outer / 8; ++block) {
      for (const int depth : {0, 4, 8, 12}) {
        std::set<int> banks;
        for (int lane = 0; lane < 32; ++lane) {
          const int offset =
              (word_outer_lane<OuterBytes>(lane, warp * warp_outer / 4) ^ outer_block(block)) +
              depth * OuterBytes;
          banks.insert(offset / 4 % 32);
          const Element want = {warp * warp_outer + block * 8 + lane / 4, depth + lane % 4};
          EXPECT_EQ(stage.at(offset), want) << "lane " << lane;
        }
        EXPECT_EQ(banks.size(), 32u);
      }
    }
  }
}

/// A thread finds the place of its chunk in every pass from that in the first.
template <int Bytes, int Step>
void check_passes() {
  for (int row = 0; row < Step; ++row) {
    for (int chunk = 0; chunk < Bytes / kChunkBytes; ++chunk) {
      for (int i = 0; i < 64 / Step; ++i) {
        if constexpr (Bytes == 64 || Bytes == 128) {
          EXPECT_EQ((depth_major_pass<Bytes, Step>(depth_major_offset<Bytes>(row, chunk), i)),
                    depth_major_offset<Bytes>(row + i * Step, chunk));
        }
        if constexpr (Bytes >= 128) {
          EXPECT_EQ((outer_major_pass<Bytes, 2, Step>(outer_major_offset<Bytes, 2>(row, chunk), i)),
                    (outer_major_offset<Bytes, 2>(row + i * Step, chunk)));
          EXPECT_EQ((outer_major_pass<Bytes, 4, Step>(outer_major_offset<Bytes, 4>(row, chunk), i)),
                    (outer_major_offset<Bytes, 4>(row + i * Step, chunk)));
        }
      }
    }
  }
}

TEST(Sm80Stage, CopyingThreadsFindTheirChunksInEveryPass) {
  check_passes<64, 32>();
  check_passes<128, 16>();
  check_passes<128, 4>();
  check_passes<256, 8>();
  check_passes<512, 4>();
  check_passes<512, 1>();
}

TEST(Sm80Stage, PlacedColumnsOfFourBlocksAreEightNeighboursInEveryLane) {
  for (int group = 0; group < 256; group += 32) {
    for (int block = 0; block < 4; ++block) {
      for (int t = 0; t < 4; ++t) {
        for (int i = 0; i < 2; ++i) {  // mma.sync leaves columns 2t and 2t + 1 in lane t
          EXPECT_EQ(placed_column(group + block * 8 + 2 * t + i), group + t * 8 + block * 2 + i);
        }
      }
    }
  }
}

TEST(Sm80Stage, PlacedColumnsOfEveryPassAreAtOneDistance) {
  for (const int step : {8, 16, 32, 64}) {
    for (int row = 0; row < step; ++row) {
      for (int pass = 0; pass * step < 256; ++pass) {
        EXPECT_EQ(placed_column(row + pass * step),
                  placed_column(row) + placed_column(pass * step));
      }
    }
  }
}

TEST(Sm80Stage, WordsOfAnOuterMajorOperandAreThoseOfMmaSync) {
  check_words<512>(64);
  check_words<512>(32);
  check_words<256>(32);
}

}  // namespace
}  // namespace moegemm::cuda::sm80
