#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "moegemm/ops.h"

namespace moegemm::torch_ops {

/// Where torch wants a call to run: its thread pool on the CPU; on a GPU its current stream, with
/// the tensors' device made current for as long as this object lives.
class Execution {
 public:
  explicit Execution(Device device);
  const ExecutionContext& context() const { return context_; }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  ExecutionContext context_;
};

/// Tells the user what a manual config was replaced with, once per process and text.
void warn_once(const std::string& note);

}  // namespace moegemm::torch_ops
