#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "moegemm/config.h"
#include "moegemm/export.h"
#include "moegemm/problem.h"

namespace moegemm {

enum class PlanSource : std::uint8_t { kHeuristic, kTuned, kManual };

/// A tile of the output and the step of its contraction, in elements.
struct TileShape {
  int rows = 0;   ///< along the segment's rows (forward, dX) or along N (dW)
  int cols = 0;   ///< along N (forward) or K (dX, dW)
  int depth = 0;  ///< contraction step
  bool operator==(const TileShape&) const = default;
};

/// What one launch does: the product itself, or a pass over rows before or after it.
enum class StepKind : std::uint8_t {
  kProduct,
  kScaleX,    ///< X times the router weights of its rows, into the workspace
  kGatherX,   ///< the rows of X in the order of the segments, into the workspace
  kGatherDy,  ///< the same of dY
  kActivate,  ///< the product in the workspace, its bias added, activated into the output
};

/// The order in which a product's tiles are handed out.
enum class TileOrder : std::uint8_t {
  kByExpert,        ///< expert after expert
  kFullTilesFirst,  ///< the full tiles of all experts, then the others
  kAlongColumns,    ///< dW: neighbours differ in their columns of X
  kAlongRows,       ///< dW: neighbours differ in their columns of dY
};

/// What the cache of the device should do with the weights of a product.
enum class WeightCaching : std::uint8_t { kKeep, kPassThrough };

/// One launch, or one parallel loop over CPU tiles. A pass has a kind, a place and a reason only.
struct Step {
  StepKind kind = StepKind::kProduct;
  BackendKind backend = BackendKind::kReference;
  int kernel = 0;           ///< position in the backend's kernel list
  std::string kernel_name;  ///< as listed by kernels()
  TileShape tile;
  int stages = 0;
  int grid = 0;  ///< thread blocks, or CPU workers
  TileOrder order = TileOrder::kByExpert;
  WeightCaching weights = WeightCaching::kKeep;
  /// Where in the workspace its result goes, in bytes; -1: into the output of the call.
  std::int64_t workspace_offset = -1;
  std::string reason;  ///< why this step, and why so
  bool operator==(const Step&) const = default;
};

/// The steps of a plan in the order of their launches. They do not change any more, and copies of a
/// plan share them: a call that returns its plan copies no text.
class Steps {
 public:
  Steps() = default;
  explicit Steps(std::vector<Step> steps)
      : steps_(std::make_shared<const std::vector<Step>>(std::move(steps))) {}

  const Step* begin() const { return steps_ ? steps_->data() : nullptr; }
  const Step* end() const { return begin() + size(); }
  std::size_t size() const { return steps_ ? steps_->size() : 0; }
  const Step& operator[](std::size_t i) const { return (*steps_)[i]; }
  bool operator==(const Steps& other) const {
    return steps_ == other.steps_ || std::equal(begin(), end(), other.begin(), other.end());
  }

 private:
  std::shared_ptr<const std::vector<Step>> steps_;
};

/// How a problem is run: pure data, printable. Every decision is in it; whoever runs it launches
/// step after step.
struct Plan {
  Steps steps;
  /// Memory that the steps hand each other results in; it comes from ExecutionContext::memory.
  std::int64_t workspace_bytes = 0;
  PlanSource source = PlanSource::kHeuristic;
  std::string note;  ///< for a manual config that was not met exactly: what runs instead

  /// The step that multiplies: every plan of this library has one.
  const Step& product() const {
    return *std::find_if(steps.begin(), steps.end(),
                         [](const Step& step) { return step.kind == StepKind::kProduct; });
  }
  /// Whether a pass of this kind is one of the steps.
  bool has(StepKind kind) const {
    return std::any_of(steps.begin(), steps.end(),
                       [kind](const Step& step) { return step.kind == kind; });
  }
  bool operator==(const Plan&) const = default;
};

MOEGEMM_API const char* to_string(PlanSource source);
MOEGEMM_API const char* to_string(StepKind kind);    ///< "product", "scale X", "gather dY", ...
MOEGEMM_API const char* to_string(TileOrder order);  ///< "by expert", "along columns", ...
MOEGEMM_API std::string to_string(const Step& step);
MOEGEMM_API std::string to_string(const Plan& plan);
MOEGEMM_API std::size_t hash_value(const Plan& plan);

}  // namespace moegemm

template <>
struct std::hash<moegemm::Plan> {
  std::size_t operator()(const moegemm::Plan& plan) const { return moegemm::hash_value(plan); }
};
