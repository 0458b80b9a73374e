#pragma once

#include <cstdint>
#include <functional>

#include "moegemm/kinds.h"
#include "moegemm/tensor.h"

/// Where and with what a call runs: threads, memory, streams, kernels loaded ahead of time, and
/// whether the planner may take any kernel.
namespace moegemm {

/// Where the CPU backend gets its threads. A framework passes its own pool so that its thread
/// settings hold and cores are not fought over; `default_executor()` serves everybody else.
class MOEGEMM_API Executor {
 public:
  virtual ~Executor() = default;

  /// How many workers `run` can have active at the same time.
  virtual int concurrency() const = 0;

  /// Calls `work(worker)` once for each worker in [0, workers) and returns when all calls have
  /// returned. Calls may run one after another or at the same time. If any throws, others may be
  /// left out, and the first exception is thrown to the caller once no call is running.
  virtual void run(int workers, const std::function<void(int)>& work) = 0;
};

/// The library's own pool: one thread per core that the process may use, or MOEGEMM_NUM_THREADS.
/// Threads start at the first use.
MOEGEMM_API Executor& default_executor();

/// Lends a call the memory that it needs besides its operands. The library owns no device memory.
class MOEGEMM_API MemorySupport {
 public:
  virtual ~MemorySupport() = default;

  /// Uninitialised memory on `device`, aligned to 256 bytes, that stays valid until the work which
  /// the call puts on its stream is done. Null when there is none.
  virtual void* allocate(std::int64_t bytes, Device device) = 0;
};

class TuningSupport;

/// What a call is promised about the launch ahead of it on its stream, so that it may begin on a
/// GPU while that still runs. Whatever else the call reads was complete before that launch began.
enum class LaunchAhead : std::uint8_t {
  kAny,         ///< nothing
  kWritesRows,  ///< of what the call reads it writes the rows (X, dY or low_rank_rows of a
                ///< product), and nothing else
  kApart,       ///< it writes nothing that the call reads
};

/// Where a call runs.
struct ExecutionContext {
  void* stream = nullptr;           ///< cudaStream_t for CUDA tensors
  Executor* executor = nullptr;     ///< threads for CPU tensors; null: default_executor()
  TuningSupport* tuning = nullptr;  ///< lets a call with `autotune` measure; null: it never does
  MemorySupport* memory = nullptr;  ///< lends Plan::workspace_bytes on a GPU; null: plans do
                                    ///< without where any kernel can, if need be a slower one
  int max_multiprocessors = 0;      ///< of a GPU, that products may take, so that other kernels can
                                    ///< run beside them; 0: all
  /// Made use of by forward, dX and combine_rows (kWritesRows) and by factor_rows (both). Products
  /// of few rows have their weights on their way while that launch still runs.
  LaunchAhead ahead = LaunchAhead::kAny;
};

/// Loads the kernels of expert layers in 16 bits onto a GPU now. Without it the driver loads each
/// at its first launch, half a millisecond each. Returns how many there are; 0 on the CPU, and on a
/// GPU where this process has no context yet, as none is made for it. Safe from any thread, also
/// while another one captures a graph.
MOEGEMM_API int load_kernels(Device device);

/// MOEGEMM_LOAD_EARLY: whether a Python process should load the kernels in the background once it
/// uses a GPU. "0" is no, "1" or empty yes; throws kInvalidValue for other words.
MOEGEMM_API bool loads_early();

/// Forward and dX are batch invariant: a row's bits depend on that row and its expert's weights
/// alone, because all kernels of a backend sum in one order. `set_batch_invariant(false)` lets the
/// planner take kernels that sum in an order of their own (KernelInfo::own_order), for all later
/// calls of this process. There is none today: plans and results are the same either way. Returns
/// what held before. It begins as MOEGEMM_BATCH_INVARIANT says, which is on unless it is 0.
MOEGEMM_API bool set_batch_invariant(bool on);
MOEGEMM_API bool is_batch_invariant();

}  // namespace moegemm
