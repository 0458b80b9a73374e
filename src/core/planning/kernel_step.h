#pragma once

#include "moegemm/info.h"
#include "moegemm/plan.h"

namespace moegemm {

/// The product by a backend's kernel number `kernel`, with `grid` thread blocks on a GPU.
inline Step kernel_step(const KernelInfo& info, int kernel, int grid = 0) {
  Step step;
  step.backend = info.backend;
  step.kernel = kernel;
  step.kernel_name = info.name;
  step.tile = info.tile;
  step.stages = info.stages;
  step.grid = grid;
  return step;
}

}  // namespace moegemm
