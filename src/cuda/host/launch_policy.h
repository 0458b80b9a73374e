#pragma once

#include "core/planning/kernel_step.h"

namespace moegemm::cuda {

/// What is decided about the launch of a kernel besides the kernel.
struct LaunchPolicy {
  int grid = 0;
  TileOrder order = TileOrder::kByExpert;
  WeightCaching weights = WeightCaching::kKeep;
};

/// The product by a backend's kernel number `kernel` under this policy.
inline Step kernel_step(const KernelInfo& info, int kernel, const LaunchPolicy& policy) {
  Step step = moegemm::kernel_step(info, kernel, policy.grid);
  step.order = policy.order;
  step.weights = policy.weights;
  return step;
}

}  // namespace moegemm::cuda
