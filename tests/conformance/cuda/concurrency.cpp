#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <thread>

#include "conformance/driver/gpu_problem.h"
#include "conformance/suites.h"
#include "cuda/backend/tile_counters.h"
#include "testing/device/cuda_graph.h"

namespace moegemm::testing {
namespace {

constexpr int kRounds = 40;
constexpr int kLaunchesPerRound = 6;

/// One problem on a stream of its own, and what it gives when nothing else runs.
struct Lane {
  Lane(const Target& target, Op op, Permutation permutation, std::int64_t scale, std::uint64_t seed)
      : memory(another_cuda_stream()),
        host(build_problem(busy_case(permutation, scale), op, DType::kBFloat16, seed)),
        problem(*memory, host),
        lender(*memory) {
    if (auto result = checked_result(target, *memory, host, problem, lender)) expected = *result;
  }
  bool refused() const { return expected.empty(); }
  void launch(const Target& target) { relaunch(target, *memory, problem, &lender); }
  void launch_round(const Target& target) {
    for (int i = 0; i < kLaunchesPerRound; ++i) launch(target);
  }
  bool right() const { return problem.output() == expected; }

  std::unique_ptr<Memory> memory;
  HostProblem host;
  DeviceProblem problem;
  BorrowedMemory lender;
  std::vector<unsigned char> expected;
};

void skip_refused(const Target& target) {
  GTEST_SKIP() << target.name() << " leaves this problem to another backend";
}

/// Long and short kernels overlap in every phase: they share nothing, or results would mix.
void expect_two_streams(const Target& target, Op op) {
  Lane a(target, op, Permutation::kX, 1, 1), b(target, op, Permutation::kY, 3, 2);
  if (a.refused() || b.refused()) return skip_refused(target);
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kLaunchesPerRound; ++i) {
      a.launch(target);
      b.launch(target);
    }
    a.memory->synchronize();
    b.memory->synchronize();
    ASSERT_TRUE(a.right()) << "stream 1, round " << round;
    ASSERT_TRUE(b.right()) << "stream 2, round " << round;
  }
}

/// A captured graph is replayed on one stream while eager calls of the same kernel run on another:
/// the workspace that the capture recorded must not be one that an eager call takes.
void expect_graph_beside_eager(const Target& target, Op op) {
  Lane captured(target, op, Permutation::kX, 1, 1), eager(target, op, Permutation::kX, 2, 2);
  if (captured.refused() || eager.refused()) return skip_refused(target);
  const CapturedGraph graph(*captured.memory, [&] { captured.launch_round(target); });
  for (int round = 0; round < kRounds; ++round) {
    graph.replay(stream_of(*captured.memory));
    eager.launch_round(target);
    graph.replay(stream_of(*captured.memory));
    eager.launch_round(target);
    captured.memory->synchronize();
    eager.memory->synchronize();
    ASSERT_TRUE(captured.right()) << "graph, round " << round;
    ASSERT_TRUE(eager.right()) << "eager, round " << round;
  }
}

void expect_two_graphs(const Target& target, Op op) {
  Lane a(target, op, Permutation::kX, 1, 1), b(target, op, Permutation::kY, 2, 2);
  if (a.refused() || b.refused()) return skip_refused(target);
  const CapturedGraph graph_a(*a.memory, [&] { a.launch_round(target); });
  const CapturedGraph graph_b(*b.memory, [&] { b.launch_round(target); });
  for (int round = 0; round < kRounds; ++round) {
    graph_a.replay(stream_of(*a.memory));
    graph_b.replay(stream_of(*b.memory));
    a.memory->synchronize();
    b.memory->synchronize();
    ASSERT_TRUE(a.right() && b.right()) << "round " << round;
  }
}

/// Each host thread plans, launches and looks at its own problem.
void expect_threads(const Target& target, Op op) {
  constexpr int kThreads = 6;
  std::vector<std::string> faults(kThreads);
  {
    Lane probe(target, op, Permutation::kX, 1, 1);
    if (probe.refused()) return skip_refused(target);
  }
  // Lanes with permute_y also multiply, which a backend may refuse in dW.
  const Permutation second =
      Lane(target, op, Permutation::kY, 1, 0).refused() ? Permutation::kX : Permutation::kY;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      try {
        Lane lane(target, op, t % 2 == 0 ? Permutation::kX : second, 1 + t % 3,
                  static_cast<std::uint64_t>(t));
        for (int round = 0; round < kRounds / 2; ++round) {
          lane.launch_round(target);
          lane.memory->synchronize();
          if (!lane.right()) faults[t] = "wrong result in round " + std::to_string(round);
        }
      } catch (const std::exception& error) {
        faults[t] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < kThreads; ++t) EXPECT_EQ(faults[t], "") << "thread " << t;
}

/// More streams than a small pool of workspaces would have slots.
void expect_many_streams(const Target& target, Op op) {
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int i = 0; i < 24; ++i) {
    lanes.push_back(
        std::make_unique<Lane>(target, op, Permutation::kX, 1, static_cast<std::uint64_t>(i)));
    if (lanes.back()->refused()) return skip_refused(target);
  }
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kLaunchesPerRound; ++i) {
      for (auto& lane : lanes) lane->launch(target);
    }
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      lanes[i]->memory->synchronize();
      ASSERT_TRUE(lanes[i]->right()) << "stream " << i << ", round " << round;
    }
  }
}

/// Launches that may overlap draw their tiles from counters of their own: each stream from one that
/// it keeps, each captured launch from one that nobody else gets.
void expect_tile_counters_apart() {
  constexpr int kStreams = 4, kCaptured = 3, kCalls = 200;
  std::set<cuda::TileCounter*> counters;
  const std::unique_ptr<Memory> capturing = another_cuda_stream();
  const CapturedGraph graph(*capturing, [&] {
    for (int i = 0; i < kCaptured; ++i) {
      counters.insert(cuda::acquire_tile_counter(0, stream_of(*capturing)));
    }
  });
  EXPECT_EQ(counters.size(), kCaptured) << "captured launches share a counter";
  std::vector<std::unique_ptr<Memory>> streams;
  for (int t = 0; t < kStreams; ++t) streams.push_back(another_cuda_stream());
  std::vector<std::set<cuda::TileCounter*>> used(kStreams);
  std::vector<std::thread> threads;
  for (int t = 0; t < kStreams; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kCalls; ++i) {
        used[t].insert(cuda::acquire_tile_counter(0, stream_of(*streams[t])));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& of_stream : used) {
    EXPECT_EQ(of_stream.size(), 1u) << "a stream changed its counter";
    counters.insert(of_stream.begin(), of_stream.end());
  }
  counters.insert(cuda::acquire_tile_counter(0, stream_of(*capturing)));
  EXPECT_EQ(counters.size(), kCaptured + kStreams + 1)
      << "launches that may overlap share a counter";
  EXPECT_FALSE(counters.contains(nullptr));
}

}  // namespace

void add_concurrency_tests() {
  if (!gpu_targets().empty()) {
    add_test("cuda/Concurrency", "LaunchesThatMayOverlapShareNoTileCounter",
             expect_tile_counters_apart);
  }
  for (const Target& target : gpu_targets()) {
    for (const Op op : {Op::kForward, Op::kDx, Op::kDw}) {
      const std::string suite = target.name() + "/Concurrency";
      const std::string suffix = std::string("_") + to_string(op);
      add_test(suite, "TwoStreams" + suffix, [target, op] { expect_two_streams(target, op); });
      add_test(suite, "GraphReplayBesideEagerCalls" + suffix,
               [target, op] { expect_graph_beside_eager(target, op); });
      add_test(suite, "TwoGraphs" + suffix, [target, op] { expect_two_graphs(target, op); });
      add_test(suite, "HostThreads" + suffix, [target, op] { expect_threads(target, op); });
      add_test(suite, "ManyStreams" + suffix, [target, op] { expect_many_streams(target, op); });
    }
  }
}

}  // namespace moegemm::testing
