#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arguments.h"
#include "moegemm/tune.h"
#include "runtime/execution.h"

namespace moegemm::torch_ops {

/// Lends memory of torch's allocator to one measurement and tells Python how far it is.
class TorchTuning final : public TuningSupport {
 public:
  void* allocate(std::int64_t bytes, Device device) override;
  bool progress(const TuneProgress& now) override;

  /// `execution`'s context with this support in it.
  ExecutionContext context(const Execution& execution);

 private:
  std::vector<Tensor> borrowed_;
};

/// Called before each timed launch with problem, kernel, its number, how many there are, the best
/// so far and its microseconds, the share that is done and the seconds left; 0 ends the
/// measurement.
using ProgressFunction = int (*)(const char* problem, const char* kernel, int candidate,
                                 int candidates, const char* best, double best_us, double done,
                                 double seconds_left);

/// Sets the process's ProgressFunction from its address; 0 for none. A number, because operators
/// take no functions: Python makes one with ctypes.
void set_tune_progress(std::int64_t address);

/// What moegemm.tune() returns for one product, as JSON.
std::string as_json(const TuneReport& report);

/// What moegemm.tuning_cache() shows, as JSON.
std::string tuning_cache();

}  // namespace moegemm::torch_ops
