#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "moegemm/passes.h"
#include "unit/core/expect_refusal.h"

namespace moegemm {
namespace {

using testing::expect_refusal;

/// T = 3, topk = 2, E = 4, R = 5: each test breaks one thing.
class CompactRouteRules : public ::testing::Test {
 protected:
  void run() const {
    route_compact(expert_ids, experts, m_sizes, gather_indices, positions, limits);
  }
  void expect_refused(ErrorKind kind, std::initializer_list<const char*> parts) const {
    expect_refusal(kind, parts, [this] { run(); });
  }

  std::vector<std::int32_t> ids = {0, 9, 2, -1, 0, 1};
  std::vector<std::int32_t> sizes = std::vector<std::int32_t>(4);
  std::vector<std::int32_t> order = std::vector<std::int32_t>(5);
  std::vector<std::int32_t> places = std::vector<std::int32_t>(6);
  std::vector<std::int64_t> count = {2}, flag = {0};
  std::int64_t experts = 4;
  TensorView expert_ids = TensorView::matrix(ids.data(), DType::kInt32, 3, 2);
  TensorView m_sizes = TensorView::vector(sizes.data(), DType::kInt32, 4);
  TensorView gather_indices = TensorView::vector(order.data(), DType::kInt32, 5);
  TensorView positions = TensorView::matrix(places.data(), DType::kInt32, 3, 2);
  RouteLimits limits;
};

TEST_F(CompactRouteRules, IdsOfOthersTakeNoRow) {
  run();
  EXPECT_EQ(sizes, (std::vector<std::int32_t>{2, 1, 1, 0}));
  EXPECT_EQ(order, (std::vector<std::int32_t>{0, 4, 5, 2, -1}));
  EXPECT_EQ(places, (std::vector<std::int32_t>{0, -1, 3, -1, 1, 2}));
}

TEST_F(CompactRouteRules, TokensPastTheirNumberTakeNoRow) {
  limits.num_tokens = TensorView::vector(count.data(), DType::kInt64, 1);
  run();
  EXPECT_EQ(sizes, (std::vector<std::int32_t>{1, 0, 1, 0}));
  EXPECT_EQ(order, (std::vector<std::int32_t>{0, 2, -1, -1, -1}));
  EXPECT_EQ(places, (std::vector<std::int32_t>{0, -1, 1, -1, -1, -1}));
}

TEST_F(CompactRouteRules, ATooSmallCapacityDropsTheLastRowsAndSetsTheFlag) {
  limits.overflow = TensorView::vector(flag.data(), DType::kInt64, 1);
  run();
  EXPECT_EQ(flag[0], 0);
  gather_indices.shape[0] = 2;
  order = {7, 7, 7, 7, 7};
  run();
  EXPECT_EQ(flag[0], 1);
  EXPECT_EQ(sizes, (std::vector<std::int32_t>{2, 0, 0, 0}));
  EXPECT_EQ(order, (std::vector<std::int32_t>{0, 4, 7, 7, 7}));
  EXPECT_EQ(places, (std::vector<std::int32_t>{0, -1, -1, -1, 1, -1}));
}

TEST_F(CompactRouteRules, CheckNamesTheFirstRowWithoutAPlace) {
  limits.check = true;
  EXPECT_NO_THROW(run());
  gather_indices.shape[0] = 2;
  expect_refused(ErrorKind::kInvalidValue, {"is 2, but 4 rows", "slot 1 of token 2", "expert 1"});
}

TEST_F(CompactRouteRules, TensorsHaveTheirShapesAndDtypes) {
  experts = 0;
  expect_refused(ErrorKind::kInvalidValue, {"num_experts is 0", "at least 1"});
  experts = 4;
  m_sizes.shape[0] = 3;
  expect_refused(ErrorKind::kInvalidValue, {"m_sizes is int32[3]", "[E] = [4]"});
  m_sizes.shape[0] = 4;
  gather_indices.dtype = DType::kInt64;
  expect_refused(ErrorKind::kInvalidType, {"gather_indices has dtype int64", "int32"});
  gather_indices.dtype = DType::kInt32;
  positions.shape[0] = 2;
  expect_refused(ErrorKind::kInvalidValue, {"positions is int32[2, 2]", "[T, topk] = [3, 2]"});
}

TEST_F(CompactRouteRules, NumTokensAndTheFlagAreOneInteger) {
  limits.num_tokens = TensorView::vector(count.data(), DType::kFloat32, 1);
  expect_refused(ErrorKind::kInvalidType, {"num_tokens has dtype fp32", "int32 and int64"});
  limits.num_tokens = TensorView::vector(count.data(), DType::kInt32, 2);
  expect_refused(ErrorKind::kInvalidValue, {"num_tokens is int32[2]", "[1]"});
  limits.num_tokens = {};
  limits.overflow = TensorView::vector(flag.data(), DType::kInt32, 2);
  expect_refused(ErrorKind::kInvalidValue, {"overflow is int32[2]", "[1]"});
  limits.overflow = TensorView::vector(sizes.data(), DType::kInt32, 1);
  expect_refused(ErrorKind::kInvalidValue, {"overflow overlaps m_sizes"});
}

/// T = 2, topk = 2, R = 3, C = 2.
class CombineRowsRules : public ::testing::Test {
 protected:
  void run() const { combine_rows(rows, weights, positions, out); }

  std::vector<float> values = {1, 2, 3, 4, 5, 6}, factors = {2, 1, 1, 10}, sums = {7, 7, 7, 7};
  std::vector<std::int32_t> places = {2, 0, -1, 1};
  TensorView rows = TensorView::matrix(values.data(), DType::kFloat32, 3, 2);
  TensorView weights = TensorView::vector(factors.data(), DType::kFloat32, 4);
  TensorView positions = TensorView::matrix(places.data(), DType::kInt32, 2, 2);
  TensorView out = TensorView::matrix(sums.data(), DType::kFloat32, 2, 2);
};

TEST_F(CombineRowsRules, RowsAreFoundByPositionAndNegativeOnesAddNothing) {
  run();
  EXPECT_EQ(sums, (std::vector<float>{11, 14, 30, 40}));
  places = {-1, 3, -5, 1 << 30};
  run();
  EXPECT_EQ(sums, (std::vector<float>{0, 0, 0, 0}));
}

TEST_F(CombineRowsRules, TensorsHaveTheirShapesAndDtypes) {
  out.shape[0] = 1;
  expect_refusal(ErrorKind::kInvalidValue, {"out is fp32[1, 2]", "[T, C] = [2, 2]"},
                 [this] { run(); });
  out.shape[0] = 2;
  positions.dtype = DType::kFloat32;
  expect_refusal(ErrorKind::kInvalidType, {"positions has dtype fp32"}, [this] { run(); });
  positions.dtype = DType::kInt32;
  positions.row_stride = 3;
  expect_refusal(ErrorKind::kInvalidValue, {"positions has rows 3 elements apart", "topk = 2"},
                 [this] { run(); });
}

/// T = 2, topk = 2, R = 4, C = 2.
class SpreadRowsRules : public ::testing::Test {
 protected:
  void run() const { spread_rows(rows, positions, gather_indices, out); }

  std::vector<float> values = {1, -0.0f, 3, 4}, copies = std::vector<float>(8, 7);
  std::vector<std::int32_t> places = {2, 0, -1, 1}, order = {1, 3, 0, -1};
  TensorView rows = TensorView::matrix(values.data(), DType::kFloat32, 2, 2);
  TensorView positions = TensorView::matrix(places.data(), DType::kInt32, 2, 2);
  TensorView gather_indices;
  TensorView out = TensorView::matrix(copies.data(), DType::kFloat32, 4, 2);
};

TEST_F(SpreadRowsRules, ATokensRowIsCopiedToEveryPositionOfItsSlots) {
  places = {2, 0, 9, 1};
  run();
  EXPECT_EQ(copies, (std::vector<float>{1, 0, 3, 4, 1, 0, 7, 7}));
  EXPECT_TRUE(std::signbit(copies[1]));
}

TEST_F(SpreadRowsRules, RowsWhoseIndexNamesNoSlotBecomeZero) {
  gather_indices = TensorView::vector(order.data(), DType::kInt32, 4);
  run();
  EXPECT_EQ(copies, (std::vector<float>{1, 0, 3, 4, 1, 0, 0, 0}));
}

TEST_F(SpreadRowsRules, TensorsHaveTheirShapesAndDtypes) {
  const auto refused = [this](ErrorKind kind, std::initializer_list<const char*> parts) {
    expect_refusal(kind, parts, [this] { run(); });
  };
  positions.shape[0] = 1;
  refused(ErrorKind::kInvalidValue, {"positions is int32[1, 2]", "[T, topk] = [2, 2]"});
  positions.shape[0] = 2;
  out.shape[1] = 1;
  refused(ErrorKind::kInvalidValue, {"out is fp32[4, 1]", "[R, C] = [4, 2]"});
  out.shape[1] = 2;
  gather_indices = TensorView::vector(order.data(), DType::kInt32, 3);
  refused(ErrorKind::kInvalidValue, {"gather_indices is int32[3]", "[R] = [4]"});
  gather_indices = {};
  out.data = rows.data;
  refused(ErrorKind::kInvalidValue, {"out overlaps rows"});
}

/// Two ranks, E = 3, R = 6.
class IndexArrivalsRules : public ::testing::Test {
 protected:
  void run() const { index_arrivals(counts, room, m_sizes, gather_indices, expert_ids); }

  std::vector<std::int64_t> rows_of = {1, 0, 2, 1, 1, 0}, ids = std::vector<std::int64_t>(8, 7);
  std::vector<std::int32_t> sizes = std::vector<std::int32_t>(3), order = sizes;
  std::int64_t room = -1;
  TensorView counts = TensorView::matrix(rows_of.data(), DType::kInt64, 2, 3);
  TensorView m_sizes = TensorView::vector(sizes.data(), DType::kInt32, 3);
  TensorView gather_indices, expert_ids;

  void SetUp() override { set_rows(5); }
  void set_rows(std::int64_t rows) {
    order.assign(static_cast<std::size_t>(rows), 7);
    gather_indices = TensorView::vector(order.data(), DType::kInt32, rows);
    expert_ids = TensorView::vector(ids.data(), DType::kInt64, rows);
  }
};

TEST_F(IndexArrivalsRules, AnExpertHasItsRowsInTheOrderOfRanks) {
  run();
  EXPECT_EQ(sizes, (std::vector<std::int32_t>{2, 1, 2}));
  EXPECT_EQ(order, (std::vector<std::int32_t>{0, 3, 4, 1, 2}));
  EXPECT_EQ(ids, (std::vector<std::int64_t>{0, 2, 2, 0, 1, 7, 7, 7}));
}

TEST_F(IndexArrivalsRules, ThereIsRoomForAnyNumber) {
  for (const std::int64_t any : {std::int64_t{5}, std::int64_t{1} << 62, INT64_MAX}) {
    room = any;
    set_rows(5);
    run();
    EXPECT_EQ(sizes, (std::vector<std::int32_t>{2, 1, 2}));
    EXPECT_EQ(order, (std::vector<std::int32_t>{0, -1, -1, 1, 2}));
    EXPECT_EQ(ids, (std::vector<std::int64_t>{0, 2, 2, 3, 3, 7, 7, 7}));
  }
}

TEST_F(IndexArrivalsRules, PlacesThatStayEmptyHaveNoExpert) {
  room = 4;
  set_rows(8);
  run();
  EXPECT_EQ(sizes, (std::vector<std::int32_t>{2, 1, 2}));
  EXPECT_EQ(order, (std::vector<std::int32_t>{0, 4, 5, 1, 2, -1, -1, -1}));
  EXPECT_EQ(ids, (std::vector<std::int64_t>{0, 2, 2, 3, 0, 1, 3, 3}));
}

TEST_F(IndexArrivalsRules, BadCountsReachNoOtherMemory) {
  rows_of = {-5, 0, 2, 100, 1, 0};
  run();
  EXPECT_EQ(ids[5], 7);
  EXPECT_EQ(sizes[0] + sizes[1] + sizes[2], 5);
  EXPECT_EQ(order, (std::vector<std::int32_t>{2, 3, 4, -1, -1}));
}

TEST_F(IndexArrivalsRules, RowsBeyondARanksRoomAreNowhere) {
  rows_of = {0, 0, 6, 1, 0, 0};
  room = 4;
  set_rows(8);
  run();
  EXPECT_EQ(sizes, (std::vector<std::int32_t>{1, 0, 6}));
  EXPECT_EQ(order, (std::vector<std::int32_t>{4, 0, 1, 2, 3, -1, -1, -1}));
  EXPECT_EQ(ids, (std::vector<std::int64_t>{2, 2, 2, 2, 0, 3, 3, 3}));
}

TEST_F(IndexArrivalsRules, EveryRowIsInTheRoomOfARank) {
  set_rows(5);
  room = 2;
  expect_refusal(ErrorKind::kInvalidValue, {"room is 2 for each of 2 ranks", "R = 5 rows"},
                 [this] { run(); });
  room = 3;
  EXPECT_NO_THROW(run());
}

TEST_F(IndexArrivalsRules, TensorsHaveTheirShapesAndDtypes) {
  const auto refused = [this](ErrorKind kind, std::initializer_list<const char*> parts) {
    expect_refusal(kind, parts, [this] { run(); });
  };
  room = -2;
  refused(ErrorKind::kInvalidValue, {"room is -2"});
  room = -1;
  m_sizes.shape[0] = 2;
  refused(ErrorKind::kInvalidValue, {"m_sizes is int32[2]", "[E] = [3]"});
  m_sizes.shape[0] = 3;
  expert_ids.dtype = DType::kInt32;
  refused(ErrorKind::kInvalidType, {"expert_ids has dtype int32", "int64"});
}

TEST_F(IndexArrivalsRules, NumbersOfRanksAndExpertsAreBelow2ToThe24) {
  counts.shape = {1, std::int64_t{1} << 24};
  expect_refusal(ErrorKind::kInvalidValue, {"counts is [1, 16777216]", "below 2^24"},
                 [this] { run(); });
}

/// T = 3, topk = 2; experts 0 to 3 are on rank 0, 4 to 7 on rank 1.
class ExchangedSlots : public ::testing::Test {
 protected:
  void find() const { first_slots(expert_ids, experts_of_rank, ranks_of_slots, pairs); }
  void take() const { ids_at_target(expert_ids, gather_indices, experts_of_rank, taken); }

  std::int64_t experts_of_rank = 4;
  std::vector<std::int64_t> ids = {5, 0, 6, 7, -1, 8}, ranks = std::vector<std::int64_t>(6, 7);
  std::vector<std::int64_t> counts = {7, 7}, out = std::vector<std::int64_t>(8, 7);
  std::vector<std::int32_t> order = {1, 0, 2, -1};
  TensorView expert_ids = TensorView::matrix(ids.data(), DType::kInt64, 3, 2);
  TensorView ranks_of_slots = TensorView::matrix(ranks.data(), DType::kInt64, 3, 2);
  TensorView pairs = TensorView::vector(counts.data(), DType::kInt64, 2);
  TensorView gather_indices = TensorView::vector(order.data(), DType::kInt32, 4);
  TensorView taken = TensorView::matrix(out.data(), DType::kInt64, 4, 2);
};

TEST_F(ExchangedSlots, OnlyTheFirstOfATokensSlotsOnARankNamesIt) {
  find();
  EXPECT_EQ(ranks, (std::vector<std::int64_t>{1, 0, 1, -1, -1, -1}));
  EXPECT_EQ(counts, (std::vector<std::int64_t>{1, 3})) << "pairs of a token and an expert there";
}

TEST_F(ExchangedSlots, ARowTakesTheIdsOfItsTargetAlongAsTheTargetCountsThem) {
  take();
  EXPECT_EQ(out, (std::vector<std::int64_t>{-1, 0, 1, -1, 2, 3, -1, -1}));
}

TEST_F(ExchangedSlots, ARankHasAnExpert) {
  experts_of_rank = 0;
  expect_refusal(ErrorKind::kInvalidValue, {"experts_of_rank is 0", "at least 1"},
                 [this] { find(); });
  expect_refusal(ErrorKind::kInvalidValue, {"experts_of_rank is 0", "at least 1"},
                 [this] { take(); });
}

}  // namespace
}  // namespace moegemm
