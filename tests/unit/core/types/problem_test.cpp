#include "moegemm/problem.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <unordered_set>
#include <vector>

namespace moegemm {
namespace {

Problem qwen3_up() {
  Problem problem;
  problem.experts = 128;
  problem.n = 1536;
  problem.k = 2048;
  problem.rows = 16384;
  problem.topk = 8;
  return problem;
}

TEST(Problem, PrintsWhatIsAskedAndLeavesDefaultsOut) {
  EXPECT_EQ(to_string(qwen3_up()), "forward bf16 E=128 M=16384 N=1536 K=2048 topk=8 on cpu");
}

TEST(Problem, PrintsEveryFieldThatIsNotTheDefault) {
  Problem problem = qwen3_up();
  problem.op = Op::kDw;
  problem.out_dtype = DType::kFloat32;
  problem.permutation = Permutation::kY;
  problem.index_dtype = DType::kInt64;
  problem.sizes_dtype = DType::kInt64;
  problem.multiply = true;
  problem.accumulate = true;
  problem.allow_tf32 = true;
  problem.input_alignment = 2;
  problem.device = {DeviceType::kCuda, 3};
  EXPECT_EQ(to_string(problem),
            "dW bf16->fp32 E=128 M=16384 N=1536 K=2048 topk=8 permute_y(int64) multiply(fp32) "
            "accumulate tf32 m_sizes(int64) align=2/16 on cuda:3");
}

TEST(Problem, PrintsItsEpilogue) {
  Problem problem = qwen3_up();
  problem.bias = true;
  problem.activation =
      Activation{ActivationFunction::kSilu, GateLayout::kInterleaved, 1.702f, 7, 1};
  EXPECT_EQ(to_string(problem),
            "forward bf16 E=128 M=16384 N=1536 K=2048 topk=8 bias activation=silu/interleaved "
            "alpha=1.702 limit=7 up_offset=1 on cpu");
  EXPECT_EQ(problem.output_columns(), 768);
}

/// One problem per field, each different from the others in that field alone.
std::vector<Problem> each_field_changed() {
  const std::vector<std::function<void(Problem&)>> changes = {
      [](Problem&) {},
      [](Problem& p) { p.op = Op::kDx; },
      [](Problem& p) { p.dtype = DType::kFloat16; },
      [](Problem& p) { p.out_dtype = DType::kFloat32; },
      [](Problem& p) { p.experts = 129; },
      [](Problem& p) { p.n = 1537; },
      [](Problem& p) { p.k = 2049; },
      [](Problem& p) { p.rows = 16385; },
      [](Problem& p) { p.topk = 9; },
      [](Problem& p) { p.permutation = Permutation::kX; },
      [](Problem& p) { p.multiply = true; },
      [](Problem& p) { p.accumulate = true; },
      [](Problem& p) { p.allow_tf32 = true; },
      [](Problem& p) { p.sizes_dtype = DType::kInt64; },
      [](Problem& p) { p.index_dtype = DType::kInt64; },
      [](Problem& p) { p.weights_dtype = DType::kBFloat16; },
      [](Problem& p) { p.input_alignment = 8; },
      [](Problem& p) { p.output_alignment = 8; },
      [](Problem& p) { p.dy_alignment = 8; },
      [](Problem& p) { p.device.type = DeviceType::kCuda; },
      [](Problem& p) { p.device.index = 1; },
      [](Problem& p) { p.bias = true; },
      [](Problem& p) { p.rows_pending = true; },
      [](Problem& p) { p.batch_invariant = false; },
      [](Problem& p) { p.low_rank = 16; },
      [](Problem& p) { p.activation = Activation{}; },
      [](Problem& p) { p.activation = Activation{.function = ActivationFunction::kGelu}; },
      [](Problem& p) { p.activation = Activation{.layout = GateLayout::kInterleaved}; },
      [](Problem& p) { p.activation = Activation{.alpha = 1.702f}; },
      [](Problem& p) { p.activation = Activation{.limit = 7.0f}; },
      [](Problem& p) { p.activation = Activation{.up_offset = 1.0f}; },
      // N and K swapped: the same numbers in other places.
      [](Problem& p) { std::swap(p.n, p.k); },
  };
  std::vector<Problem> problems;
  for (const auto& change : changes) {
    problems.push_back(qwen3_up());
    change(problems.back());
  }
  return problems;
}

TEST(Problem, EveryFieldCountsForEqualityAndHash) {
  const std::vector<Problem> problems = each_field_changed();
  const std::unordered_set<Problem> distinct(problems.begin(), problems.end());
  EXPECT_EQ(distinct.size(), problems.size());
  std::set<std::size_t> hashes;
  for (const Problem& problem : problems) hashes.insert(hash_value(problem));
  EXPECT_EQ(hashes.size(), problems.size());
}

TEST(Problem, EqualProblemsHaveEqualHashes) {
  EXPECT_EQ(qwen3_up(), qwen3_up());
  EXPECT_EQ(hash_value(qwen3_up()), hash_value(qwen3_up()));
}

TEST(Problem, HashSpreadsNeighbouringRowCounts) {
  std::set<std::size_t> low_bits;
  for (int rows = 0; rows < 4096; ++rows) {
    Problem problem = qwen3_up();
    problem.rows = rows;
    low_bits.insert(hash_value(problem) % 4096);
  }
  EXPECT_GT(low_bits.size(), 4096u / 2);  // random placement fills 1 - 1/e = 63 %
}

TEST(Problem, KnowsWhoGathersAndWhoScatters) {
  struct Row {
    Op op;
    Permutation permutation;
    bool gathers_x, gathers_dy, scatters;
  };
  for (const Row& row : {
           Row{Op::kForward, Permutation::kNone, false, false, false},
           Row{Op::kForward, Permutation::kX, true, false, false},
           Row{Op::kForward, Permutation::kY, false, false, true},
           Row{Op::kDx, Permutation::kNone, false, false, false},
           Row{Op::kDx, Permutation::kX, false, false, true},
           Row{Op::kDx, Permutation::kY, false, true, false},
           Row{Op::kDw, Permutation::kNone, false, false, false},
           Row{Op::kDw, Permutation::kX, true, false, false},
           Row{Op::kDw, Permutation::kY, false, true, false},
       }) {
    Problem problem = qwen3_up();
    problem.op = row.op;
    problem.permutation = row.permutation;
    EXPECT_EQ(problem.gathers_x(), row.gathers_x) << to_string(problem);
    EXPECT_EQ(problem.gathers_dy(), row.gathers_dy) << to_string(problem);
    EXPECT_EQ(problem.scatters(), row.scatters) << to_string(problem);
    EXPECT_EQ(problem.gather_divisor(), row.gathers_x ? 8 : 1) << to_string(problem);
  }
}

TEST(Problem, ReadsDyByTokenWhenItHasOneRowPerToken) {
  for (const Op op : {Op::kDx, Op::kDw}) {
    Problem problem = qwen3_up();
    problem.op = op;
    problem.permutation = Permutation::kY;
    const std::size_t hash = hash_value(problem);
    problem.dy_per_token = true;
    EXPECT_EQ(problem.gather_divisor(), 8) << to_string(problem);
    EXPECT_NE(hash_value(problem), hash);
    EXPECT_NE(to_string(problem).find("dy_per_token"), std::string::npos);
  }
}

TEST(Problem, CountsTwoOperationsPerMultiplyAdd) {
  EXPECT_EQ(qwen3_up().flops(), 2.0 * 16384 * 1536 * 2048);
  EXPECT_EQ(qwen3_up().tokens(), 2048);
}

}  // namespace
}  // namespace moegemm
