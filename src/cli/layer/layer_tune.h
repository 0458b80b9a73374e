#pragma once

#include <functional>
#include <string>
#include <vector>

#include "layer/layer_run.h"
#include "moegemm/tune.h"

namespace moegemm::testing {
class Memory;
}

namespace moegemm::cli {

struct TunedProduct {
  std::string op;  ///< "forward 1"
  TuneReport report;
};

struct LayerTuning {
  double budget_seconds = 2;  ///< per product
  bool again = false;         ///< also what is known
  /// Before each launch; false ends the whole run, and what was found is kept.
  std::function<bool(const std::string& op, const TuneProgress& now)> progress;
};

/// Measures the six products of a layer on random operands and remembers the fastest kernels.
std::vector<TunedProduct> tune_layer(const LayerSpec& spec, testing::Memory& memory,
                                     const LayerTuning& tuning);

/// Device memory that `tune_layer` needs at its peak.
double tuning_bytes(const LayerSpec& spec);

}  // namespace moegemm::cli
