#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "conformance/driver/gpu_problem.h"
#include "conformance/suites.h"
#include "moegemm/error.h"
#include "moegemm/info.h"
#include "moegemm/passes.h"
#include "testing/device/cuda_graph.h"
#include "testing/device/device_vector.h"
#include "testing/numerics/random.h"

namespace moegemm::testing {
namespace {

/// Captured once, replayed with other routing in the same memory: valid, extreme and bad.
void expect_replay_follows_routing(const Target& target, const ProblemCase& spec, Op op,
                                   DType dtype, const std::string& kernel = "") {
  Memory& memory = *target.memory;
  HostProblem host = build_problem(spec, op, dtype, run_seed());
  DeviceProblem problem(memory, host);
  GemmOptions options = problem.options();
  options.backend = target.backend;
  if (!kernel.empty()) options.config.emplace().kernel = kernel;
  BorrowedMemory lender(memory);
  std::optional<CapturedGraph> graph;
  Plan plan;
  try {
    plan = problem.call(options, lender.context());  // nothing is allocated under capture
    graph.emplace(memory, [&] { problem.call(options, lender.context()); });
  } catch (const Error& error) {
    const bool refusal = error.kind() == ErrorKind::kNotImplemented ||
                         (!kernel.empty() && error.kind() == ErrorKind::kInvalidValue);
    if (refusal) GTEST_SKIP() << error.what();
    throw;
  }
  EXPECT_LE(graph->nodes(), plan.steps.size() + (plan.workspace_bytes > 0 ? 2 : 1))
      << "a step is one launch, and one more where it zeroes; the lender poisons what it lends";

  const std::vector<std::vector<std::int64_t>> routings = {
      {100, 0, 257, 1, 64, 333},  // as captured
      {0, 760, 0, 0, 0, 0},       // all on one expert
      {0, 0, 0, 0, 0, 0},         // nothing
      {1, 1, 1, 1, 1, 1},
      {126, 127, 127, 127, 127, 126},
      {-5, 300, -1, 2'000'000'000, 2'000'000'000, 9},  // bad
      {333, 64, 1, 257, 0, 100},
  };
  for (std::size_t i = 0; i < routings.size(); ++i) {
    SCOPED_TRACE("routing number " + std::to_string(i));
    reroute(host, routings[i], run_seed() + i);
    problem.upload_routing(host);
    problem.poison_output(memory);
    graph->replay(stream_of(memory));
    memory.synchronize();
    const Comparison comparison = compare(host, problem.output(), target.accuracy);
    ASSERT_TRUE(comparison.passed()) << describe(comparison);
    ASSERT_EQ(problem.trespass(), "");
  }
}

/// route, its inverse and combine in one graph, replayed with other expert ids.
void expect_routing_replays(const RowTarget& target) {
  Memory& memory = *target.memory;
  constexpr std::int64_t kTokens = 500, kTopk = 4, kExperts = 40, kCols = 72;
  constexpr std::int64_t kRows = kTokens * kTopk;
  Random random(run_seed());
  const HostMatrix rows = random_matrix(DType::kBFloat16, kRows, kCols, 0, 0, random);
  const DeviceMatrix device_rows(memory, rows);
  const DeviceMatrix out(memory, poisoned_matrix(DType::kBFloat16, kTokens, kCols, 0, 0));
  const DeviceVector ids(memory, DType::kInt32, kRows), sizes(memory, DType::kInt32, kExperts);
  const DeviceVector indices(memory, DType::kInt32, kRows), inverse(memory, DType::kInt32, kRows);
  const DeviceVector workspace(memory, DType::kInt32,
                               (route_workspace_bytes(kRows, kExperts, memory.device()) + 3) / 4);
  const TensorView ids_view =
      TensorView::matrix(ids.view().data, DType::kInt32, kTokens, kTopk, 0, memory.device());
  const CapturedGraph route_graph(memory, [&] {
    route(ids_view, kExperts, sizes.view(), indices.view(), inverse.view(), workspace.view().data,
          memory.context());
  });
  EXPECT_LE(route_graph.nodes(), 2u);
  const CapturedGraph combine_graph(
      memory, [&] { combine(device_rows.view(), {}, kTopk, out.view(), memory.context()); });
  EXPECT_EQ(combine_graph.nodes(), 1u);

  for (int round = 0; round < 4; ++round) {
    std::vector<std::int32_t> values(kRows);
    for (std::int32_t& id : values) {
      id = static_cast<std::int32_t>(random.between(-1, round == 3 ? 0 : kExperts));
    }
    memory.copy_in(ids.view().data, values.data(), kRows * sizeof(std::int32_t));
    route_graph.replay(stream_of(memory));
    combine_graph.replay(stream_of(memory));
    memory.synchronize();
    std::vector<std::int64_t> want_sizes(kExperts, 0);
    for (const std::int32_t id : values) {
      if (id >= 0 && id < kExperts) ++want_sizes[id];
    }
    ASSERT_EQ(sizes.integers(), want_sizes);
    const std::vector<std::int64_t> order = indices.integers(), back = inverse.integers();
    const auto key = [&](std::int64_t flat) {
      return std::pair(
          values[flat] >= 0 && values[flat] < kExperts ? values[flat] : static_cast<int>(kExperts),
          flat);
    };
    for (std::int64_t r = 0; r < kRows; ++r) {
      ASSERT_TRUE(order[r] >= 0 && order[r] < kRows);
      ASSERT_EQ(back[order[r]], r);
      ASSERT_TRUE(r == 0 || key(order[r - 1]) < key(order[r])) << "position " << r;
    }
  }
  const std::vector<unsigned char> combined = out.download();
  for (std::int64_t i = 0; i < kTokens * kCols; ++i) {
    ASSERT_FALSE(is_poison(DType::kBFloat16, combined.data(), i)) << "element " << i;
  }
}

}  // namespace

void add_graph_tests() {
  for (const Target& target : gpu_targets()) {
    for (const Op op : {Op::kForward, Op::kDx, Op::kDw}) {
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
        for (const Permutation permutation :
             {Permutation::kNone, Permutation::kX, Permutation::kY}) {
          add_test(target.name() + "/Graph",
                   std::string("ReplayFollowsRouting_") + to_string(op) + "_" + to_string(dtype) +
                       "_" + to_string(permutation),
                   [target, op, dtype, permutation] {
                     expect_replay_follows_routing(target, busy_case(permutation), op, dtype);
                   });
        }
      }
    }
  }
  for (const Target& target : gpu_targets()) {
    for (const KernelInfo& kernel : kernels()) {
      const bool fuses = kernel.name.find("_activated_") != std::string::npos;
      if (kernel.backend != target.backend || !fuses) continue;
      for (const Permutation permutation : {Permutation::kNone, Permutation::kX}) {
        ProblemCase activated = busy_case(permutation);
        activated.activation = Activation{};
        activated.bias = true;
        add_test(target.name() + "/Graph",
                 "ReplayFollowsRouting_" + kernel.name + "_" + to_string(permutation),
                 [target, activated, name = kernel.name] {
                   expect_replay_follows_routing(target, activated, Op::kForward, DType::kBFloat16,
                                                 name);
                 });
      }
    }
  }
  for (const RowTarget& target : row_targets()) {
    if (target.memory->device().type != DeviceType::kCuda) continue;
    add_test(target.name + "/Graph", "RoutingReplaysWithOtherIds",
             [&target] { expect_routing_replays(target); });
  }
}

}  // namespace moegemm::testing
