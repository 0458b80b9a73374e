#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "moegemm/config.h"
#include "moegemm/export.h"
#include "moegemm/info.h"
#include "moegemm/plan.h"
#include "moegemm/problem.h"

/// Why a problem gets the plan it gets.
namespace moegemm {

/// What a device sustains, in round numbers: good enough to tell what limits a problem and which
/// kernels are hopeless, not to rank two good ones.
struct MachineLimits {
  double flops_per_second = 0;       ///< of the problem's dtype; 0: unknown, nothing is predicted
  double bytes_per_second = 0;       ///< of device memory
  double tile_bytes_per_second = 0;  ///< from caches into tiles, all units together; 0: no limit
  int units = 1;                     ///< multiprocessors or cores
  double launch_us = 0;
};

/// A prediction from host facts: sizes and MachineLimits, with rows spread at random over experts.
struct CostEstimate {
  double flops = 0;  ///< useful work: 2 M N K
  double bytes = 0;  ///< that must cross device memory: touched weights, rows and the output, once
  double tiles = 0;
  double waves = 0;       ///< tiles per unit
  double compute_us = 0;  ///< with what tiles pad and the last wave leaves idle
  double memory_us = 0;
  double tile_load_us = 0;  ///< operands from caches into tiles
  double total_us = 0;      ///< the largest of the three and the launch; 0: nothing is predicted

  /// "compute", "memory" or "tile loads".
  MOEGEMM_API const char* limit() const;
};

struct PlanCandidate {
  KernelInfo kernel;
  bool chosen = false;
  std::string refused;  ///< why it cannot run the problem; empty if it can
  CostEstimate cost;    ///< of a kernel that can
  std::string remark;   ///< why it was chosen or lost, or `refused` again
};

struct PlanExplanation {
  Plan plan;
  MachineLimits limits;
  CostEstimate cost;                       ///< of the plan's product; passes are not predicted
  std::vector<PlanCandidate> candidates;   ///< kernels of the plan's backend and op, list order
  std::vector<std::string> not_available;  ///< "sm90: no CUDA device: ...", the backends before it
};

/// The plan for a problem and the case for and against every kernel of its backend. `autotune`
/// plans as a call with GemmOptions::autotune would.
MOEGEMM_API PlanExplanation explain(const Problem& problem,
                                    const std::optional<BackendKind>& backend = std::nullopt,
                                    const std::optional<KernelConfig>& config = std::nullopt,
                                    bool autotune = false);

}  // namespace moegemm
