#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "core/planning/planner.h"
#include "core/tuning/cache/store.h"
#include "unit/core/scoped_environment.h"
#include "unit/core/tuning/cache/temporary_folder.h"

namespace moegemm {
namespace {

Planned plan_rows(std::int64_t rows) {
  Problem problem;
  problem.experts = problem.n = problem.k = 4;
  problem.rows = rows;
  return process_planner().plan(problem, {}, {}, true);
}

// The runtimes of sanitizers have threads and locks of their own, which a fork leaves as they are.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST(Fork, ChildrenPlanWhateverOtherThreadsWereDoing) {
  const testing::TemporaryFolder folder;
  const testing::ScopedEnvironment cache("MOEGEMM_CACHE_DIR", folder.path().c_str());
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    for (std::int64_t rows = 1; !done; ++rows) plan_rows(rows);
  });
  threads.emplace_back([&] {
    while (!done) process_planner().forget_plans();
  });
  threads.emplace_back([&] {
    for (int i = 0; !done; ++i) {
      tuning_store().settle({"cpu", "1", "1", std::to_string(i % 100)}, {{"k", 0, "k", 0}, "", 1});
    }
  });
  int failures = 0;
  for (int repeat = 0; repeat < 100; ++repeat) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // ends a child that stalls
      plan_rows(7);
      process_planner().forget_plans();
      tuning_store().settle({"cpu", "1", "1", "mine"}, {{"k", 0, "k", 0}, "", 1});
      plan_rows(9);
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    failures += status != 0 ? 1 : 0;
    if (failures != 0) break;
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
}
#endif

}  // namespace
}  // namespace moegemm
