#include "core/tuning/measure/operand_rotation.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <vector>

#include "unit/core/tuning/measure/host_support.h"

namespace moegemm {
namespace {

using testing::HostSupport;

/// forward with permute_x: 8 tokens, 2 slots, 4 experts of which 3 are in use; rows of X are
/// padded.
class OperandRotationTest : public ::testing::Test {
 protected:
  OperandRotationTest() {
    call.problem.dtype = call.problem.out_dtype = DType::kFloat32;
    call.problem.experts = 4;
    call.problem.n = 32;
    call.problem.k = 16;
    call.problem.rows = 16;
    call.problem.topk = 2;
    call.problem.permutation = Permutation::kX;
    call.problem.multiply = true;
    for (auto* values : {&x, &w, &weights}) {
      for (std::size_t i = 0; i < values->size(); ++i) (*values)[i] = static_cast<float>(i % 97);
    }
    for (std::size_t i = 0; i < gather.size(); ++i) gather[i] = static_cast<std::int32_t>(15 - i);
    call.operands.x = x.data();
    call.operands.x_stride = 20;
    call.operands.w = w.data();
    call.operands.w_stride = 16;
    call.operands.out = y.data();
    call.operands.out_stride = 32;
    call.operands.m_sizes = m_sizes.data();
    call.operands.gather_indices = gather.data();
    call.operands.router_weights = weights.data();
  }

  std::optional<OperandRotation> borrow(std::int64_t cache_bytes) {
    return OperandRotation::borrow(call, 0, {2 * cache_bytes, cache_bytes}, {}, support);
  }
  /// X [8, 16], three of four W_e [32, 16], Y [16, 32], sizes, indices and weights.
  static constexpr std::int64_t kTouched = 4 * (8 * 16 + 3 * 32 * 16 + 16 * 32 + 4 + 16 + 16);

  HostSupport support;
  Call call;
  std::vector<float> x = std::vector<float>(7 * 20 + 16);
  std::vector<float> w = std::vector<float>(std::size_t{4} * 32 * 16);
  std::vector<float> y = std::vector<float>(std::size_t{16} * 32, -7);
  std::vector<float> weights = std::vector<float>(16);
  std::vector<std::int32_t> m_sizes = {5, 0, 4, 7};
  std::vector<std::int32_t> gather = std::vector<std::int32_t>(16);
};

TEST_F(OperandRotationTest, CallThatExceedsTheCacheKeepsTheCallersInputs) {
  auto rotation = borrow(kTouched / 2);
  ASSERT_TRUE(rotation);
  EXPECT_EQ(rotation->sets(), 1);
  EXPECT_EQ(rotation->flush(), nullptr);
  EXPECT_EQ(rotation->memory_bytes(), 16 * 32 * 4) << "the output only";
  for (int i = 0; i < 3; ++i) {
    const Operands& set = rotation->next();
    EXPECT_EQ(set.x, x.data());
    EXPECT_EQ(set.w, w.data());
    EXPECT_NE(set.out, y.data());
  }
}

TEST_F(OperandRotationTest, SetsThatFitTheCacheTakeTurnsUntilTheyExceedItTwice) {
  auto rotation = borrow(5 * kTouched);
  ASSERT_TRUE(rotation);
  EXPECT_EQ(rotation->sets(), 10);
  EXPECT_EQ(rotation->flush(), nullptr);
  std::vector<Operands> seen;
  for (int i = 0; i < 10; ++i) seen.push_back(rotation->next());
  const auto all_differ = [&](const auto& member) {
    std::set<const void*> places;
    for (const Operands& set : seen) places.insert(member(set));
    return places.size() == seen.size();
  };
  EXPECT_TRUE(all_differ([](const Operands& set) { return set.x; }));
  EXPECT_TRUE(all_differ([](const Operands& set) { return set.w; }));
  EXPECT_TRUE(all_differ([](const Operands& set) { return static_cast<const void*>(set.out); }));
  EXPECT_TRUE(all_differ([](const Operands& set) { return set.m_sizes; }));
  EXPECT_TRUE(all_differ([](const Operands& set) { return set.gather_indices; }));
  EXPECT_TRUE(all_differ([](const Operands& set) { return set.router_weights; }));
  EXPECT_EQ(rotation->next().x, seen[0].x) << "the eleventh launch begins again";
}

TEST_F(OperandRotationTest, CopiesEqualTheCallersInputsAndThoseStayAsTheyWere) {
  const std::vector<float> x_before = x;
  const std::vector<float> w_before = w;
  auto rotation = borrow(20 * kTouched);
  ASSERT_TRUE(rotation);
  const auto same = [](const void* a, const auto& values) {
    return std::memcmp(a, values.data(), values.size() * sizeof(values[0])) == 0;
  };
  for (int i = 0; i < rotation->sets(); ++i) {
    const Operands& set = rotation->next();
    EXPECT_TRUE(same(set.x, x)) << i;
    EXPECT_TRUE(same(set.w, w)) << i;
    EXPECT_TRUE(same(set.m_sizes, m_sizes)) << i;
    EXPECT_TRUE(same(set.gather_indices, gather)) << i;
    EXPECT_TRUE(same(set.router_weights, weights)) << i;
    EXPECT_EQ(set.x_stride, 20);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(i == 0 ? set.out : set.w) % 16, 0u) << i;
    std::memset(set.out, 0, y.size() * sizeof(float));  // outputs overlap no input
  }
  for (int i = 0; i < rotation->sets(); ++i) EXPECT_TRUE(same(rotation->next().w, w)) << i;
  EXPECT_EQ(x, x_before);
  EXPECT_EQ(w, w_before);
  for (const float value : y) EXPECT_EQ(value, -7);
}

TEST_F(OperandRotationTest, MemoryForCopiesIsShortAndTheCacheIsFlushedInstead) {
  support.most_bytes = 5 * kTouched;
  auto rotation = borrow(5 * kTouched);
  ASSERT_TRUE(rotation);
  EXPECT_EQ(rotation->sets(), 1);
  EXPECT_NE(rotation->flush(), nullptr);
  EXPECT_EQ(rotation->memory_bytes(), 16 * 32 * 4 + 5 * kTouched);
}

TEST_F(OperandRotationTest, LayerWithFewExpertsInUseIsNotCopiedManyTimesOver) {
  call.problem.experts = 400;
  w.resize(std::size_t{400} * 32 * 16);
  m_sizes = std::vector<std::int32_t>(400);
  m_sizes[399] = 16;
  call.operands.w = w.data();
  call.operands.m_sizes = m_sizes.data();
  auto rotation = borrow(20 * kTouched);
  ASSERT_TRUE(rotation);
  EXPECT_NE(rotation->flush(), nullptr);
  for (const std::int64_t bytes : support.asked) EXPECT_LE(bytes, 20 * kTouched);
}

TEST_F(OperandRotationTest, WithoutMemoryForAnOutputThereIsNoRotation) {
  support.most_bytes = 0;
  EXPECT_FALSE(borrow(5 * kTouched));
  support.most_bytes = 16 * 32 * 4;  // an output, but neither copies nor a buffer to flush with
  EXPECT_FALSE(borrow(5 * kTouched));
}

TEST_F(OperandRotationTest, BiasIsCopiedAndAnActivatedOutputIsNarrower) {
  std::vector<float> bias(std::size_t{4} * 32, 3);
  call.operands.bias = bias.data();
  call.operands.bias_stride = 32;
  call.operands.out_stride = 16;
  call.operands.router_weights = nullptr;
  call.problem.multiply = false;
  call.problem.bias = true;
  call.problem.activation.emplace();
  ASSERT_EQ(call.problem.output_columns(), 16);
  EXPECT_EQ(borrow(1)->memory_bytes(), 16 * 16 * 4);
  auto rotation = borrow(5 * kTouched);
  ASSERT_GT(rotation->sets(), 2);
  EXPECT_EQ(rotation->next().bias, bias.data());
  const void* copied = rotation->next().bias;
  EXPECT_NE(copied, bias.data());
  EXPECT_EQ(std::memcmp(copied, bias.data(), bias.size() * sizeof(float)), 0);
}

TEST_F(OperandRotationTest, SizesOf64BitsCountTheSameExperts) {
  const std::vector<std::int64_t> wide = {5, 0, 4, 7};
  call.problem.sizes_dtype = DType::kInt64;
  call.operands.m_sizes = wide.data();
  const std::int64_t touched = kTouched + 4 * 4;
  EXPECT_EQ(borrow(touched / 2)->sets(), 1);
  EXPECT_EQ(borrow(touched / 2 + 1)->sets(), 2);
}

}  // namespace
}  // namespace moegemm
