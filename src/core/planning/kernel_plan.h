#pragma once

#include "moegemm/info.h"
#include "moegemm/plan.h"

namespace moegemm {

/// The plan that runs a backend's kernel number `kernel` with `grid` blocks or workers.
inline Plan kernel_plan(const KernelInfo& info, int kernel, int grid) {
  Plan plan;
  plan.backend = info.backend;
  plan.kernel = kernel;
  plan.kernel_name = info.name;
  plan.tile = info.tile;
  plan.stages = info.stages;
  plan.grid = grid;
  return plan;
}

}  // namespace moegemm
