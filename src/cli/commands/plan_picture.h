#pragma once

#include <string>
#include <vector>

#include "moegemm/plan.h"

namespace moegemm::cli {

/// One product of a layer, as `moegemm plan` names and explains it.
struct PlannedProduct {
  std::string name;  ///< "forward 1"
  Problem problem;
  PlanExplanation explained;
};

/// The predictions as an SVG of 900 x 420: every product under the roofline of its device, and how
/// long compute, memory and tile loads take each. Colours and type are those of moegemm-bench.
std::string plan_svg(const std::string& title, const std::vector<PlannedProduct>& products);

}  // namespace moegemm::cli
