#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "moegemm/execution.h"

namespace moegemm {
namespace {

using std::chrono::microseconds;

/// More threads than the smallest machine has cores: they also get in each other's way.
const bool more_threads_than_cores = setenv("MOEGEMM_NUM_THREADS", "4", 0) == 0;

/// Ends the process when a test that may wait for ever takes longer than `limit`.
class Watchdog {
 public:
  explicit Watchdog(std::chrono::seconds limit)
      : thread_([this, limit] {
          std::unique_lock lock(mutex_);
          if (done_.wait_for(lock, limit, [this] { return finished_; })) return;
          std::fprintf(stderr, "the executor has stalled\n");
          std::abort();
        }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      finished_ = true;
    }
    done_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  bool finished_ = false;
  std::thread thread_;
};

/// Returns when all threads of the pool are inside the same call: each has started and woken up.
void meet_all_threads(Executor& executor) {
  const int workers = executor.concurrency();
  std::atomic<int> arrived = 0;
  executor.run(workers, [&](int) {
    ++arrived;
    while (arrived < workers) std::this_thread::yield();
  });
}

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

// A thread that sleeps through its job would let the others wait for ever. The pauses lie around
// the 50 microseconds after which threads go to sleep.
TEST(DefaultExecutor, NoThreadSleepsThroughAJob) {
  const Watchdog watchdog(std::chrono::seconds(240));
  for (int repeat = 0; repeat < 1000; ++repeat) {
    meet_all_threads(default_executor());
    if (repeat % 2 == 0) std::this_thread::sleep_for(microseconds(30 + repeat % 40));
  }
}

// The caller goes to sleep when its own share is done before that of the others.
TEST(DefaultExecutor, NoCallerSleepsThroughTheEndOfItsJob) {
  const Watchdog watchdog(std::chrono::seconds(240));
  std::atomic<int> done = 0;
  for (int repeat = 0; repeat < 2000; ++repeat) {
    const auto length = microseconds(30 + repeat % 40);
    default_executor().run(2, [&](int worker) {
      if (worker == 1) std::this_thread::sleep_for(length);
      ++done;
    });
  }
  EXPECT_EQ(done, 2 * 2000);
}

TEST(DefaultExecutor, ThousandsOfTinyJobsFromManyThreadsAllFinish) {
  const Watchdog watchdog(std::chrono::seconds(240));
  std::vector<std::thread> callers;
  std::atomic<int> done = 0;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (int repeat = 0; repeat < 5000; ++repeat) {
        default_executor().run(3, [&](int) { ++done; });
        if (repeat % 16 == caller) std::this_thread::sleep_for(microseconds(60));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(done, 4 * 5000 * 3);
}

/// Throws std::bad_alloc on the calling thread, or on all others, while all are inside one call.
void fail_on(Executor& executor, bool calling_thread) {
  const std::thread::id caller = std::this_thread::get_id();
  const int workers = executor.concurrency();
  std::atomic<int> arrived = 0;
  executor.run(workers, [&](int) {
    ++arrived;
    while (arrived < workers) std::this_thread::yield();
    if ((std::this_thread::get_id() == caller) == calling_thread) throw std::bad_alloc();
  });
}

TEST(DefaultExecutor, HandsExceptionsToTheCallerAndServesAgain) {
  const Watchdog watchdog(std::chrono::seconds(240));
  for (int repeat = 0; repeat < 20; ++repeat) {
    for (const bool calling_thread : {true, false}) {
      EXPECT_THROW(fail_on(default_executor(), calling_thread), std::bad_alloc);
      meet_all_threads(default_executor());  // needs them all: the pool is not taken for ever
    }
  }
}

// The thread sanitizer's runtime has threads of its own, which do not survive a fork either.
#if !defined(__SANITIZE_THREAD__)
TEST(DefaultExecutor, WorksInAForkedChild) {
  // A thread that is still starting may hold a lock of a sanitizer's runtime, which the child would
  // then wait for.
  meet_all_threads(default_executor());
  const pid_t child = fork();
  if (child == 0) {
    alarm(120);  // ends a child that stalls
    const bool good = calls_of(default_executor(), 4) == std::vector<int>(4, 1);
    _exit(good ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(DefaultExecutorDeathTest, DoesNotHoldUpTheEndOfTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // this process has threads
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
