#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "moegemm/kinds.h"
#include "moegemm/problem.h"
#include "moegemm/tensor.h"

/// How a problem is run, and why so: kernels and configs, plans, predictions.
namespace moegemm {

/// Who runs a problem. `kReference` is the plain oracle, `kCpu` the fast CPU kernels, `kSm90` the
/// Hopper kernels, `kSm80` the kernels for every NVIDIA GPU from Ampere up.
enum class BackendKind : std::uint8_t { kReference, kCpu, kSm90, kSm80 };
/// Best first.
inline constexpr Named<BackendKind> kBackends[] = {
    {BackendKind::kSm90, "sm90"},
    {BackendKind::kSm80, "sm80"},
    {BackendKind::kCpu, "cpu"},
    {BackendKind::kReference, "reference"},
};

MOEGEMM_API const char* to_string(BackendKind kind);
/// The inverse of to_string; empty for any other word.
MOEGEMM_API std::optional<BackendKind> parse_backend(const std::string& name);

/// A kernel asked for by hand. Kernels are compiled ahead of time: the exact one runs if it exists,
/// else the nearest feasible one (`Plan::source` and `Plan::note` say so). Zero means "any".
/// The extents are those of TileShape; in terms of the problem's M, N and K that is
///   forward: rows along M, columns along N, depth along K
///   dX:      rows along M, columns along K, depth along N
///   dW:      rows along N, columns along K, depth along M
struct KernelConfig {
  int block_rows = 0;                    ///< tile extent along the rows of the output
  int block_columns = 0;                 ///< tile extent along the columns of the output
  int block_depth = 0;                   ///< contraction step
  int stages = 0;                        ///< pipeline depth
  std::optional<bool> tma_load_rows;     ///< X (forward, dW) or dY (dX) through TMA
  std::optional<bool> tma_load_weights;  ///< W (forward, dX) or dY (dW) through TMA
  std::optional<bool> tma_store;         ///< output through TMA
  std::string kernel;  ///< exact kernel name as `moegemm info --kernels` lists it; empty: any

  bool operator==(const KernelConfig&) const = default;
};

MOEGEMM_API std::string to_string(const KernelConfig& config);

enum class PlanSource : std::uint8_t { kHeuristic, kTuned, kManual };

/// A tile of the output and the step of its contraction, in elements.
struct TileShape {
  int rows = 0;     ///< along the segment's rows (forward, dX) or along N (dW)
  int columns = 0;  ///< along N (forward) or K (dX, dW)
  int depth = 0;    ///< contraction step
  bool operator==(const TileShape&) const = default;
};

/// A compiled kernel.
struct KernelInfo {
  BackendKind backend = BackendKind::kReference;
  std::string name;
  Op op = Op::kForward;
  TileShape tile;
  int stages = 0;
  WeightFormat weights = WeightFormat::kPlain;  ///< what it decodes W from
  bool own_order = false;  ///< sums in another order than others of its backend; none does today
  bool ups_apart = false;  ///< reads gates and ups from two tensors, where one map spans both
};

/// What one launch does: the product itself, or a pass over rows before or after it.
enum class StepKind : std::uint8_t {
  kProduct,
  kScaleX,      ///< X times the router weights of its rows, into the workspace
  kDequantise,  ///< W, decoded into the workspace
  kGatherX,     ///< the rows of X in the order of the segments, into the workspace
  kGatherDy,    ///< the same of dY
  kAlignX,      ///< the rows of X, padded with zeros to multiples of 16 bytes, into the workspace
  kAlignDy,     ///< the same of dY
  kAlignW,      ///< the same of W
  kZeroGaps,    ///< zeros in the output's rows that are in no segment
  kActivate,    ///< the product in the workspace, its bias added, activated into the output
  kTrim,        ///< the padded product in the workspace, into the output
};

/// The order in which a product's tiles are handed out.
enum class TileOrder : std::uint8_t {
  kByExpert,        ///< expert after expert
  kFullTilesFirst,  ///< the full tiles of all experts, then the others
  kAlongColumns,    ///< dW: neighbours differ in their columns of X
  kAlongRows,       ///< dW: neighbours differ in their columns of dY
};

/// Which columns of the output a product makes: those of W, and those of GemmOptions::w_up.
enum class Columns : std::uint8_t { kAll, kFirstHalf, kSecondHalf };

/// What the cache of the device should do with the weights of a product.
enum class WeightCaching : std::uint8_t { kKeep, kPassThrough };

/// When a launch on a GPU begins, as to the one ahead of it on its stream.
enum class LaunchStart : std::uint8_t {
  kAfter,        ///< when that has ended
  kEarly,        ///< before, as soon as there is room; it waits for that before it reads or writes
  kWithWeights,  ///< the same, but its first weights come before: see LaunchAhead::kWritesRows
};

/// One launch, or one parallel loop over CPU tiles. A pass has a kind, a place and a reason only.
struct Step {
  StepKind kind = StepKind::kProduct;
  BackendKind backend = BackendKind::kReference;
  int kernel = 0;           ///< position in the backend's kernel list
  std::string kernel_name;  ///< as listed by kernels()
  TileShape tile;           ///< the kernel's, or fewer rows
  int stages = 0;
  int grid = 0;                 ///< thread blocks, or CPU workers
  std::int64_t smem_bytes = 0;  ///< shared memory of a thread block
  TileOrder order = TileOrder::kByExpert;
  WeightCaching weights = WeightCaching::kKeep;
  Columns columns = Columns::kAll;
  LaunchStart start = LaunchStart::kAfter;
  /// Of W cut by features (N of forward, K of dX): the first one that a kDequantise step decodes or
  /// a product makes, and how many; 0: all of them.
  std::int64_t first_feature = 0;
  std::int64_t features = 0;
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
MOEGEMM_API const char* to_string(StepKind kind);      ///< "product", "scale X", "gather dY", ...
MOEGEMM_API const char* to_string(TileOrder order);    ///< "by expert", "along columns", ...
MOEGEMM_API const char* to_string(LaunchStart start);  ///< "after", "early", "early with weights"
MOEGEMM_API std::string to_string(const Step& step);
MOEGEMM_API std::string to_string(const Plan& plan);
MOEGEMM_API std::size_t hash_value(const Plan& plan);

/// The plan that a call with this problem would get, without running it. Its workspace_bytes are
/// what the call asks of ExecutionContext::memory, if it can: where that memory would only save
/// time, the call does without it rather than fail. Without `may_use_workspace` it is the plan of a
/// call whose context.memory is null; workspace_bytes that are left are then needed.
MOEGEMM_API Plan plan(const Problem& problem,
                      const std::optional<BackendKind>& backend = std::nullopt,
                      const std::optional<KernelConfig>& config = std::nullopt,
                      bool may_use_workspace = true);

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

/// The GPUs that problems can be planned for on a machine that has none, by their names for it:
/// "h200", "a100", ...
MOEGEMM_API std::vector<std::string> planning_gpus();

/// The device to put into a Problem for plan() and explain(); nothing for an unknown name. Nothing
/// runs on it.
MOEGEMM_API std::optional<Device> planning_gpu(const std::string& name);

}  // namespace moegemm

template <>
struct std::hash<moegemm::Plan> {
  std::size_t operator()(const moegemm::Plan& plan) const { return moegemm::hash_value(plan); }
};
