#pragma once

#include <functional>

#include "moegemm/export.h"

namespace moegemm {

/// Where the CPU backend gets its threads. A framework passes its own pool so that its thread
/// settings hold and cores are not fought over; `default_executor()` serves everybody else.
class MOEGEMM_API Executor {
 public:
  virtual ~Executor() = default;

  /// How many workers `run` can have active at the same time.
  virtual int concurrency() const = 0;

  /// Calls `work(worker)` once for each worker in [0, workers) and returns when all calls have
  /// returned. Calls may run one after another or at the same time; `work` does not throw.
  virtual void run(int workers, const std::function<void(int)>& work) = 0;
};

/// The library's own pool: one thread per core that the process may use, or MOEGEMM_NUM_THREADS.
/// Threads start at the first use.
MOEGEMM_API Executor& default_executor();

}  // namespace moegemm
