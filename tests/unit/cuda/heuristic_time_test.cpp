#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cuda/sm80/kernels.h"
#include "cuda/sm90/kernels.h"

/// The heuristics read host facts only, so a GPU can be made up where there is none.
namespace moegemm::cuda {
namespace {

const DeviceFacts kH200 = {
    .name = "NVIDIA H200",
    .major = 9,
    .minor = 0,
    .multiprocessors = 132,
    .memory_bytes = std::int64_t{141} << 30,
    .shared_memory_bytes = 227 << 10,
    .l2_bytes = 60 << 20,
    .clock_hz = 1.98e9,
    .bytes_per_second = 4.9e12,
    .multiprocessor_shared_memory_bytes = 228 << 10,
};
const DeviceFacts kA100 = {
    .name = "NVIDIA A100",
    .major = 8,
    .minor = 0,
    .multiprocessors = 108,
    .memory_bytes = std::int64_t{80} << 30,
    .shared_memory_bytes = 163 << 10,
    .l2_bytes = 40 << 20,
    .clock_hz = 1.41e9,
    .bytes_per_second = 2.0e12,
    .multiprocessor_shared_memory_bytes = 164 << 10,
};

/// Every model of the catalogue, six products, 16 to 32768 tokens.
std::vector<Problem> catalogue() {
  std::vector<Problem> problems;
  std::ifstream file(MOEGEMM_SOURCE_DIR "/data/models.json");
  const nlohmann::json models = nlohmann::json::parse(file);
  for (const auto& model : models.at("models")) {
    const std::int64_t hidden = model.at("hidden");
    const std::int64_t intermediate = model.at("intermediate");
    for (const std::int64_t tokens : {16, 64, 512, 2048, 8192, 32768}) {
      for (const Op op : {Op::kForward, Op::kDx, Op::kDw}) {
        for (const bool first : {true, false}) {
          Problem problem;
          problem.op = op;
          problem.experts = model.at("experts");
          problem.topk = model.at("topk");
          problem.rows = tokens * problem.topk;
          problem.n = first ? 2 * intermediate : hidden;
          problem.k = first ? hidden : intermediate;
          problem.permutation = first ? Permutation::kX : Permutation::kY;
          problem.multiply = !first && op == Op::kForward;
          problems.push_back(problem);
        }
      }
    }
  }
  return problems;
}

/// Best of several rounds: other work on the machine only ever adds time.
double nanoseconds(const std::function<int()>& plan) {
  double best = 1e9;
  for (int round = 0; round < 10; ++round) {
    constexpr int kCalls = 20;
    const auto begin = std::chrono::steady_clock::now();
    int sum = 0;
    for (int i = 0; i < kCalls; ++i) sum += plan();
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    EXPECT_GE(sum, 0);
    best = std::min(best, took.count() / kCalls);
  }
  return best;
}

/// `plan` returns the blocks of the grid.
void expect_under_five_microseconds(const std::function<int(const Problem&)>& plan) {
  double slowest = 0;
  const std::vector<Problem> problems = catalogue();
  ASSERT_GT(problems.size(), 400u);
  for (const Problem& problem : problems) {
    ASSERT_GT(plan(problem), 0) << to_string(problem);
    const double ns = nanoseconds([&] { return plan(problem); });
    EXPECT_LT(ns, 5000) << to_string(problem);
    slowest = std::max(slowest, ns);
  }
  ::testing::Test::RecordProperty("slowest_nanoseconds", static_cast<int>(slowest));
}

/// Grid, order of tiles and cache policy belong to the plan.
void expect_quick_choice(const Generation& generation, const std::vector<KernelEntry>& kernels,
                         const DeviceFacts& facts) {
  expect_under_five_microseconds([&](const Problem& problem) {
    const int chosen = choose(generation, kernels, problem, facts);
    return chosen < 0 ? -1 : kernels[chosen].grid(kernels[chosen], problem, facts).grid;
  });
}

TEST(HeuristicTime, HopperKernelIsChosenInUnderFiveMicroseconds) {
  expect_quick_choice(sm90::kGeneration, sm90::kernels(), kH200);
}

TEST(HeuristicTime, Sm80KernelIsChosenInUnderFiveMicroseconds) {
  expect_quick_choice(sm80::kGeneration, sm80::kernels(), kA100);
  expect_quick_choice(sm80::kGeneration, sm80::kernels(), kH200);
}

}  // namespace
}  // namespace moegemm::cuda
