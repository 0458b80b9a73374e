#include "moegemm/executor.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "core/environment.h"

namespace moegemm {
namespace {

/// Cores that this process may run on: fewer than the machine has under taskset or in a container.
int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

/// True on a thread that is inside `work`: a nested `run` must not wait for its own pool.
thread_local bool inside_work = false;

class ThreadPool final : public Executor {
 public:
  ThreadPool() : concurrency_(environment_num_threads().value_or(usable_cores())) {}

  ~ThreadPool() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int concurrency() const override { return concurrency_; }

  void run(int workers, const std::function<void(int)>& work) override {
    std::unique_lock turn(turn_, std::defer_lock);
    if (workers <= 1 || concurrency_ == 1 || inside_work || !turn.try_lock()) {
      for (int worker = 0; worker < workers; ++worker) work(worker);
      return;
    }
    start_threads();
    {
      std::lock_guard lock(mutex_);
      work_ = &work;
      workers_ = workers;
      next_ = 0;
      active_ = static_cast<int>(threads_.size());
      ++generation_;
    }
    wake_.notify_all();
    take_workers(work, workers);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return active_ == 0; });
  }

 private:
  void start_threads() {
    while (static_cast<int>(threads_.size()) + 1 < concurrency_) {
      threads_.emplace_back([this] { serve(); });
    }
  }

  void take_workers(const std::function<void(int)>& work, int workers) {
    inside_work = true;
    for (int worker = next_++; worker < workers; worker = next_++) work(worker);
    inside_work = false;
  }

  void serve() {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
      const std::function<void(int)>& work = *work_;
      const int workers = workers_;
      lock.unlock();
      take_workers(work, workers);
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  const int concurrency_;
  std::mutex turn_;  // one run at a time has the threads; others do their work themselves
  std::vector<std::thread> threads_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  const std::function<void(int)>* work_ = nullptr;
  int workers_ = 0;
  std::atomic<int> next_ = 0;
  int active_ = 0;
  std::uint64_t generation_ = 0;
  bool stopping_ = false;
};

}  // namespace

Executor& default_executor() {
  static ThreadPool pool;
  return pool;
}

}  // namespace moegemm
