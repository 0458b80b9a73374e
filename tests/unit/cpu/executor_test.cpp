#include "moegemm/executor.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

namespace moegemm {
namespace {

/// How often each worker was called.
std::vector<int> calls_of(Executor& executor, int workers) {
  std::vector<std::atomic<int>> calls(workers);
  executor.run(workers, [&](int worker) { ++calls[worker]; });
  return {calls.begin(), calls.end()};
}

TEST(DefaultExecutor, CallsEveryWorkerOnce) {
  for (int workers : {0, 1, 2, 3, 8, 100}) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      EXPECT_EQ(calls_of(default_executor(), workers), std::vector<int>(workers, 1));
    }
  }
}

TEST(DefaultExecutor, ServesAgainAfterItsThreadsFellAsleep) {
  for (int repeat = 0; repeat < 5; ++repeat) {
    EXPECT_EQ(calls_of(default_executor(), 4), std::vector<int>(4, 1));
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
}

TEST(DefaultExecutor, ANestedCallDoesNotWaitForItself) {
  std::atomic<int> inner = 0;
  default_executor().run(4, [&](int) { default_executor().run(3, [&](int) { ++inner; }); });
  EXPECT_EQ(inner, 12);
}

TEST(DefaultExecutor, ConcurrentCallersAllGetTheirWorkDone) {
  std::vector<std::thread> callers;
  std::atomic<int> done = 0;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 100; ++repeat) {
        default_executor().run(5, [&](int) { ++done; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(done, 4 * 100 * 5);
}

TEST(DefaultExecutor, ResultsOfAllWorkersAreVisibleToTheCaller) {
  std::vector<int> plain(64);
  for (int repeat = 1; repeat <= 200; ++repeat) {
    default_executor().run(64, [&](int worker) { plain[worker] = repeat; });
    ASSERT_EQ(plain, std::vector<int>(64, repeat));
  }
}

// A sanitizer's runtime has threads of its own, which do not survive a fork either.
#if !defined(__SANITIZE_THREAD__)
TEST(DefaultExecutor, WorksInAForkedChild) {
  calls_of(default_executor(), 4);
  const pid_t child = fork();
  if (child == 0) {
    const bool good = calls_of(default_executor(), 4) == std::vector<int>(4, 1);
    _exit(good ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(DefaultExecutorDeathTest, DoesNotHoldUpTheEndOfTheProcess) {
  EXPECT_EXIT(
      {
        calls_of(default_executor(), 4);
        std::exit(7);
      },
      ::testing::ExitedWithCode(7), "");
}
#endif

}  // namespace
}  // namespace moegemm
