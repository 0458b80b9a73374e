#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "core/process/environment.h"
#include "moegemm/execution.h"

namespace moegemm {
namespace {

/// Cores that this process may run on: fewer than the machine has under taskset or in a container.
int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Long enough to bridge the gap between two products of a layer, short enough not to be noticed by
/// whoever else needs the core. Waking a sleeping thread takes about as long.
constexpr std::chrono::microseconds kSpin{50};

/// Waits until `value` is no longer `old`: a short spin, then sleep.
template <typename T>
T wait_for_change(const std::atomic<T>& value, T old) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      const T now = value.load(std::memory_order_acquire);
      if (now != old) return now;
      pause_core();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  value.wait(old, std::memory_order_acquire);
  return value.load(std::memory_order_acquire);
}

/// Threads join a job while it is open and leave it when no worker is left to be taken; the caller
/// closes it once it has run out of workers itself, then waits for those who joined. Nobody waits
/// for a thread that is still asleep. Threads are detached and the pool is never destroyed: at exit
/// nothing has to be joined, and a thread blocked on it does not keep the process alive.
class ThreadPool final : public Executor {
 public:
  ThreadPool() : concurrency_(environment_num_threads().value_or(usable_cores())) {}

  int concurrency() const override { return concurrency_; }

  void run(int workers, const std::function<void(int)>& work) override {
    // A second caller, or a nested call, finds the pool taken and does its work itself.
    if (workers <= 1 || concurrency_ == 1 || taken_.exchange(true, std::memory_order_acquire)) {
      for (int worker = 0; worker < workers; ++worker) work(worker);
      return;
    }
    start_threads();
    work_ = &work;
    workers_ = workers;
    next_.store(0, std::memory_order_relaxed);
    state_.store(kOpen, std::memory_order_release);
    job_.fetch_add(1, std::memory_order_release);
    job_.notify_all();
    take_workers();
    std::uint32_t state = state_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    while (state != 0) state = wait_for_change(state_, state);
    const std::exception_ptr failure = std::exchange(failure_, nullptr);
    failed_.store(false, std::memory_order_relaxed);
    taken_.store(false, std::memory_order_release);
    if (failure) std::rethrow_exception(failure);
  }

 private:
  static constexpr std::uint32_t kOpen = 1;
  static constexpr std::uint32_t kJoined = 2;  // times the threads inside

  void start_threads() {
    while (threads_ + 1 < concurrency_ && !thread_limit_) {
      try {
        std::thread([this] { serve(); }).detach();
        ++threads_;
      } catch (const std::system_error&) {
        thread_limit_ = true;  // fewer threads, the same results
      }
    }
  }

  void take_workers() {
    const std::function<void(int)>& work = *work_;
    const int workers = workers_;
    for (int worker = next_++; worker < workers; worker = next_++) {
      try {
        work(worker);
      } catch (...) {
        if (!failed_.exchange(true, std::memory_order_relaxed)) failure_ = std::current_exception();
      }
    }
  }

  void serve() {
    std::uint32_t seen = 0;
    while (true) {
      seen = wait_for_change(job_, seen);
      if (!join()) continue;
      take_workers();
      if (state_.fetch_sub(kJoined, std::memory_order_acq_rel) == kJoined) state_.notify_one();
    }
  }

  bool join() {
    std::uint32_t state = state_.load(std::memory_order_relaxed);
    while ((state & kOpen) != 0) {
      if (state_.compare_exchange_weak(state, state + kJoined, std::memory_order_acquire)) {
        return true;
      }
    }
    return false;
  }

  const int concurrency_;
  std::atomic<bool> taken_ = false;
  int threads_ = 0;  // who has taken the pool reads and writes these two
  bool thread_limit_ = false;

  const std::function<void(int)>* work_ = nullptr;  // of the open job
  int workers_ = 0;
  std::exception_ptr failure_;  // written by the first to set failed_, read at the end
  std::atomic<bool> failed_ = false;
  alignas(64) std::atomic<int> next_ = 0;
  alignas(64) std::atomic<std::uint32_t> state_ = 0;
  alignas(64) std::atomic<std::uint32_t> job_ = 0;
};

std::atomic<ThreadPool*> current_pool = nullptr;

ThreadPool& make_pool() {
  // A child of fork() has none of its parent's threads: it gets a pool of its own.
  static std::once_flag registered;
  std::call_once(registered,
                 [] { pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr); }); });
  ThreadPool* made = new ThreadPool;
  ThreadPool* expected = nullptr;
  if (current_pool.compare_exchange_strong(expected, made)) return *made;
  delete made;  // another thread was first; this one has started nothing
  return *expected;
}

}  // namespace

Executor& default_executor() {
  ThreadPool* pool = current_pool.load(std::memory_order_acquire);
  return pool != nullptr ? *pool : make_pool();
}

}  // namespace moegemm
