#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moegemm/kinds.h"
#include "moegemm/ops.h"
#include "moegemm/plan.h"
#include "moegemm/problem.h"

/// Measured instead of predicted kernels. A call with GemmOptions::autotune takes the kernel that
/// was fastest when its problem was measured, here or in an earlier process; ExecutionContext::
/// tuning lets it measure a problem that nobody has measured yet. Nothing is ever measured during
/// CUDA graph capture or with MOEGEMM_AUTOTUNE=0 in the environment.
namespace moegemm {

/// How far a measurement is, shortly before each launch.
struct TuneProgress {
  const Problem& problem;
  const std::string& kernel;  ///< about to be timed
  int candidate = 0;          ///< its number, from 1
  int candidates = 0;
  const std::string& best;  ///< fastest so far; empty before the first result
  double best_us = 0;
  double done = 0;          ///< share of the work or of the budget, whichever is further: 0 to 1
  double seconds_left = 0;  ///< of the budget
};

/// What a caller lends to a measurement. The library owns no device memory: the outputs of timed
/// launches go to memory that comes from here, never to the caller's tensors, and so do copies of
/// the inputs where those would fit into the caches. A device without memory for copies gets its
/// caches overwritten before each launch.
class MOEGEMM_API TuningSupport {
 public:
  virtual ~TuningSupport() = default;

  /// Uninitialised memory on `device`, aligned to 256 bytes, that stays valid until this object is
  /// destroyed. Null when there is none: the problem is then not measured.
  virtual void* allocate(std::int64_t bytes, Device device) = 0;

  /// False ends the measurement; what was found until then is kept. What it throws ends it too and
  /// reaches the caller. Calls with `autotune` that it makes itself measure nothing.
  virtual bool progress(const TuneProgress&) { return true; }

  double budget_seconds = 2;  ///< per problem; above 0
};

/// What became of one kernel, timed with every pass that it takes beside it.
struct TuneCandidate {
  std::string kernel;
  double predicted_us = 0;  ///< 0: the backend predicts nothing
  double median_us = 0;     ///< 0: never timed
  int launches = 0;
  std::string outcome;  ///< "fastest", "slower", or why it was refused, pruned or stopped
};

struct TuneReport {
  Problem problem;
  Plan plan;  ///< what calls with `autotune` get from now on
  std::vector<TuneCandidate> candidates;
  double seconds = 0;
  int operand_sets = 0;           ///< that the launches took in turn; the first is the caller's own
  bool flushed = false;           ///< caches were overwritten before each launch instead
  std::int64_t memory_bytes = 0;  ///< lent by TuningSupport
  bool measured = false;     ///< false: it was known, there was no choice, or `why_not` says why
  bool interrupted = false;  ///< TuningSupport::progress ended it
  std::string why_not;       ///< why nothing was measured although nothing was known
  std::string not_saved;     ///< why a measurement is kept in this process only
};

/// Measures one product on the caller's operands; `context.tuning` must be given. A problem that is
/// known is not measured again unless `again`. The output is described by its view only: nothing is
/// written there.
MOEGEMM_API TuneReport tune_forward(const TensorView& x, const TensorView& w, const TensorView& y,
                                    const RoutingView& routing, const GemmOptions& options,
                                    const ExecutionContext& context, bool again = false);
MOEGEMM_API TuneReport tune_dx(const TensorView& dy, const TensorView& w, const TensorView& dx,
                               const RoutingView& routing, const GemmOptions& options,
                               const ExecutionContext& context, bool again = false);
MOEGEMM_API TuneReport tune_dw(const TensorView& dy, const TensorView& x, const TensorView& dw,
                               const RoutingView& routing, const GemmOptions& options,
                               const ExecutionContext& context, bool again = false);

/// One remembered measurement. Device, version and kernel set say where it holds; the problem is a
/// bucket: token counts are rounded up to a power of two.
struct TunedEntry {
  std::string device;
  std::string version;
  std::string kernel_set;
  std::string problem;
  std::string kernel;  ///< the fastest
  double us = 0;
  std::string heuristic;  ///< what the heuristic would have taken
  double heuristic_us = 0;
};

/// The JSON file that keeps measurements: tuning.json in MOEGEMM_CACHE_DIR, else in the folder
/// moegemm of XDG_CACHE_HOME or ~/.cache; empty when none of these is set.
MOEGEMM_API std::string tuning_cache_path();
/// Everything remembered, from the file and from this process.
MOEGEMM_API std::vector<TunedEntry> tuning_cache_entries();
/// Forgets everything, in the file and in this process; returns how many entries there were.
MOEGEMM_API std::size_t clear_tuning_cache();
/// Everything remembered as the text of such a file.
MOEGEMM_API std::string export_tuning_cache();
/// Adds the entries of such a text (a newer measurement replaces an older one of the same problem);
/// returns how many there were. Throws kInvalidValue when it is not such a text, kRuntime when the
/// file cannot be written; this process has them then all the same.
MOEGEMM_API std::size_t import_tuning_cache(const std::string& text);

}  // namespace moegemm
