#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>
#include <string>

#include "moegemm/ops.h"

namespace moegemm::torch_ops {

/// Where torch wants a call to run: its thread pool on the CPU; on a GPU its current stream, with
/// the tensors' device made current for as long as this object lives.
class Execution {
 public:
  /// `flops` decides on the CPU whether other threads are worth waking.
  Execution(Device device, double flops);
  const ExecutionContext& context() const { return context_; }
  /// The same with a promise about the launch ahead, if that is given.
  ExecutionContext context(LaunchAhead ahead, bool given) const {
    ExecutionContext promised = context_;
    if (given) promised.ahead = ahead;
    return promised;
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  ExecutionContext context_;
};

/// See ExecutionContext::max_multiprocessors, for all later calls of this process; returns what
/// held before.
std::int64_t set_max_multiprocessors(std::int64_t most);

/// Keeps what the user should be told about a manual config, once per process and text, until
/// take_notes() hands it to Python's warnings. `at_once` warns through torch instead: compiled
/// graphs have operators without Python.
void note_once(const std::string& note, bool at_once);
/// The notes since the last call, one per line.
std::string take_notes();

}  // namespace moegemm::torch_ops
