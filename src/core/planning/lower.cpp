#include "core/planning/lower.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>
#include <vector>

#include "core/planning/passes.h"
#include "core/refusal.h"

namespace moegemm {
namespace {

/// A plan whose product has no kernel yet.
class Draft {
 public:
  Draft(const Problem& problem, const Backend& backend) : product_(problem) {
    if (problem.op != Op::kDw && problem.segments != Segments::kPacked &&
        problem.tails == Tails::kZero && !backend.fills_gaps()) {
      add(StepKind::kZeroGaps, "no tile covers what lies between segments");
    }
  }

  /// What is left for the product.
  const Problem& product() const { return product_; }
  std::int64_t workspace_bytes() const { return workspace_bytes_; }
  bool has_pass() const { return !before_.empty() || !after_.empty(); }

  Draft& add(StepKind pass, std::string reason) {
    Step step;
    step.kind = pass;
    step.reason = std::move(reason);
    const bool follows = pass == StepKind::kActivate || pass == StepKind::kTrim;
    if (follows) {
      product_offset_ = workspace_bytes_;
    } else {
      step.workspace_offset = workspace_bytes_;
      product_.rows_pending = false;  // the launch ahead of the product is this pass
    }
    workspace_bytes_ += moegemm::workspace_bytes(pass, product_);
    if (pass == StepKind::kDequantise) cut_ = features_at_a_time(product_);
    product_ = product_beside(pass, product_);
    (follows ? after_ : before_).push_back(std::move(step));
    return *this;
  }

  /// Whether W is decoded and multiplied by some features at a time.
  bool is_cut() const { return cut_ > 0 && cut_ < product_.features(); }

  /// As many products as the weights have parts: where no kernel reads both tensors of them one for
  /// each, and one for each cut. Nothing changes the product after this.
  Draft& part() {
    features_ = product_.features();
    halves_ = product_.ups_apart;
    if (halves_) product_ = half_of(product_);
    if (is_cut()) product_ = cut_of(product_, cut_);
    return *this;
  }

  Plan finish(Step product, PlanSource source) && {
    product.workspace_offset = product_offset_;
    if (cut_ > 0 && cut_ < features_) {
      add_cuts(std::move(product));
    } else {
      if (halves_) {
        product.columns = Columns::kFirstHalf;
        before_.push_back(product);
        product.columns = Columns::kSecondHalf;
      }
      before_.push_back(std::move(product));
    }
    std::move(after_.begin(), after_.end(), std::back_inserter(before_));
    Plan plan;
    plan.steps = Steps(std::move(before_));
    plan.workspace_bytes = workspace_bytes_;
    plan.source = source;
    return plan;
  }

 private:
  /// Decoding, which is the last pass before the product, and the product for each cut.
  void add_cuts(Step product) {
    Step decoding = std::move(before_.back());
    before_.pop_back();
    decoding.features = product.features = cut_;
    for (std::int64_t first = 0; first < features_; first += cut_) {
      decoding.first_feature = product.first_feature = first;
      before_.push_back(decoding);
      before_.push_back(product);
    }
  }

  Problem product_;
  std::vector<Step> before_;
  std::vector<Step> after_;
  std::int64_t workspace_bytes_ = 0;
  std::int64_t product_offset_ = -1;
  std::int64_t features_ = 0;  ///< of all products together
  std::int64_t cut_ = 0;       ///< that are decoded at a time; 0: nothing is decoded first
  bool halves_ = false;
};

/// A problem in its forms, the better ones first: as a kernel that does all of it, and with passes
/// beside the product.
using Forms = std::vector<Draft>;

bool runs(const Backend& backend, const Problem& problem) {
  const auto kernels = backend.kernels();
  return std::any_of(kernels.begin(), kernels.end(), [&](const KernelInfo& kernel) {
    return backend.refuse(problem, kernel).empty();
  });
}

/// The forms of what a draft leaves for its product.
Forms forms_of(const Draft& whole, const Backend& backend, WorkspaceUse workspace) {
  const Problem& problem = whole.product();
  if (problem.activation) {
    // Both have the same bits.
    const bool fused_first = workspace != WorkspaceUse::kFree || backend.fusing_is_faster(problem);
    Draft apart = Draft(whole).add(
        StepKind::kActivate, fused_first ? "the kernel does not activate its own results"
                                         : "faster than a kernel that activates its own results");
    apart.part();
    if (whole.is_cut()) return {apart};  // gates and ups would not come together
    return fused_first ? Forms{whole, apart} : Forms{apart, whole};
  }
  if (problem.op == Op::kDw && problem.multiply) {
    const bool scaled_first = workspace != WorkspaceUse::kAvoid && backend.scales_first(problem);
    const Draft scaled = Draft(whole).add(
        StepKind::kScaleX, scaled_first ? "tensor cores read their operands as memory has them"
                                        : "the kernel multiplies no rows by router weights");
    return scaled_first ? Forms{scaled, whole} : Forms{whole, scaled};
  }
  return {Draft(whole).part()};
}

/// With both inputs copied into aligned rows.
Draft aligned(const Problem& problem, const Backend& backend) {
  const std::string reason = "kernels for aligned rows gain more than the copies take";
  Draft draft(problem, backend);
  const bool trims = needs_trimming(problem);
  if (problem.op != Op::kDx) draft.add(StepKind::kAlignX, reason);
  if (problem.op != Op::kForward) draft.add(StepKind::kAlignDy, reason);
  if (problem.op != Op::kDw) draft.add(StepKind::kAlignW, reason);
  if (trims) draft.add(StepKind::kTrim, "the product of padded inputs is larger than the output");
  return draft;
}

Forms forms_of(const Problem& problem, const Backend& backend, WorkspaceUse workspace) {
  const Draft packed(problem, backend);
  Forms forms = forms_of(packed, backend, workspace);
  if (workspace == WorkspaceUse::kFree && !is_aligned(problem) && can_align(problem) &&
      backend.aligning_first_is_faster(problem)) {
    // All have the same bits.
    Forms padded = forms_of(aligned(problem, backend), backend, workspace);
    std::move(forms.begin(), forms.end(), std::back_inserter(padded));
    return padded;
  }
  if (problem.quantization.plain()) return forms;
  // All have the same bits.
  const bool pass_first =
      workspace == WorkspaceUse::kFree && backend.dequantising_first_is_faster(problem);
  const Draft decoded =
      Draft(packed).add(StepKind::kDequantise,
                        pass_first ? std::string("faster than a kernel that decodes W itself")
                                   : join("no kernel of ", to_string(backend.kind()), " decodes ",
                                          to_string(problem.quantization), " for this problem"));
  Forms after_pass = forms_of(decoded, backend, workspace);
  if (pass_first) std::swap(forms, after_pass);
  std::move(after_pass.begin(), after_pass.end(), std::back_inserter(forms));
  return forms;
}

/// Why a backend cannot run this problem with any of its kernels; empty if it can. The reason of a
/// kernel for the same op and the same weights says more than "this one computes dW"; that of one
/// which would take the problem with a single expert says most.
std::string why_not(const Backend& backend, const Problem& problem) {
  std::string reason = join("it has no kernel for ", to_string(problem.op));
  if (!problem.quantization.plain()) {
    reason += join(" with ", to_string(problem.quantization), " weights");
  }
  Problem one_expert = problem;
  one_expert.experts = 1;
  int said = 0;  // how much
  for (const KernelInfo& kernel : backend.kernels()) {
    std::string refusal = backend.refuse(problem, kernel);
    if (refusal.empty()) return {};
    const bool its_kind = kernel.op == problem.op && kernel.weights == problem.quantization.format;
    const bool its_experts = its_kind && backend.refuse(one_expert, kernel).empty();
    const int says = static_cast<int>(its_kind) + static_cast<int>(its_experts);
    if (says > said) {
      reason = std::move(refusal);
      said = says;
    }
  }
  return reason;
}

/// How far a kernel is from what was asked, in doublings summed over the extents that were given.
double distance(const KernelConfig& wanted, const KernelInfo& kernel) {
  const auto doublings = [](int asked, int have) {
    return asked == 0 ? 0.0 : std::abs(std::log2(static_cast<double>(asked) / std::max(have, 1)));
  };
  return doublings(wanted.block_rows, kernel.tile.rows) +
         doublings(wanted.block_columns, kernel.tile.columns) +
         doublings(wanted.block_depth, kernel.tile.depth) + doublings(wanted.stages, kernel.stages);
}

Plan with_kernel(Draft draft, const Backend& backend, int kernel, PlanSource source,
                 std::string reason) {
  Step product = backend.plan_with(draft.product(), kernel);
  product.reason = std::move(reason);
  return std::move(draft).finish(std::move(product), source);
}

Plan with_nearest(Draft draft, const Backend& backend, const KernelConfig& config) {
  // The heuristic's kernel comes first: it stays unless another one is strictly nearer.
  const Problem product = draft.product();
  const auto kernels = backend.kernels();
  int nearest = backend.choose(product);
  double nearest_distance = distance(config, kernels[nearest]);
  for (std::size_t i = 0; i < kernels.size() && nearest_distance > 0; ++i) {
    const double candidate = distance(config, kernels[i]);
    if (candidate < nearest_distance && backend.refuse(product, kernels[i]).empty()) {
      nearest = static_cast<int>(i);
      nearest_distance = candidate;
    }
  }
  Plan plan = with_kernel(std::move(draft), backend, nearest, PlanSource::kManual,
                          nearest_distance > 0 ? "nearest to what was asked for" : "asked for");
  if (nearest_distance > 0) {
    const KernelInfo& kernel = kernels[nearest];
    plan.note = join("asked for ", to_string(config), "; the nearest kernel is ", kernel.name,
                     " with tile ", kernel.tile.rows, "x", kernel.tile.columns, "x",
                     kernel.tile.depth, " stages ", kernel.stages);
  }
  return plan;
}

int position_of(const Backend& backend, const std::string& name) {
  const auto kernels = backend.kernels();
  const auto found = std::find_if(kernels.begin(), kernels.end(),
                                  [&](const KernelInfo& kernel) { return kernel.name == name; });
  return found == kernels.end() ? -1 : static_cast<int>(found - kernels.begin());
}

/// The better form that this kernel runs.
std::optional<Draft> form_for(const Problem& problem, const Backend& backend, int kernel,
                              WorkspaceUse workspace, std::string& why_not) {
  // What is faster has been decided by whoever names the kernel.
  if (problem.activation) workspace = WorkspaceUse::kNeeded;
  Forms forms = forms_of(problem, backend, workspace);
  const KernelInfo& info = backend.kernels()[kernel];
  for (Draft& form : forms) {
    std::string reason = backend.refuse(form.product(), info);
    if (reason.empty()) return std::move(form);
    // What is wrong with the bare product says more than what the kernel leaves to a pass.
    const bool its_weights = form.product().quantization.format == info.weights;
    if (why_not.empty() || (form.has_pass() && its_weights)) why_not = std::move(reason);
  }
  return std::nullopt;
}

/// dW after a copy of its permuted operand into order, where that is faster.
Draft gathering_first(Draft draft, const Backend& backend, WorkspaceUse workspace) {
  const Problem& product = draft.product();
  // The copy is of all rows, whatever their segments.
  const bool all_rows =
      product.segments == Segments::kPacked && product.planned_rows() == product.rows;
  if (workspace != WorkspaceUse::kFree || product.op != Op::kDw || !product.gathers() ||
      !all_rows || !backend.gathering_first_is_faster(product)) {
    return draft;
  }
  const StepKind pass = gathering_pass(product);
  if (!runs(backend, product_beside(pass, product))) return draft;
  return draft.add(pass, "the product gains more from rows in order than the copy takes");
}

/// The kernel for a draft that `backend` runs.
Plan with_best(const Problem& problem, Draft draft, const Backend& backend,
               const PlanRequest& request, const TunedKernel& tuned) {
  if (request.config) return with_nearest(std::move(draft), backend, *request.config);
  PlanSource source = PlanSource::kHeuristic;
  if (request.autotune && tuned) {
    const int kernel = position_of(backend, tuned(problem, backend));
    std::string ignored;
    if (kernel >= 0) {
      std::optional<Plan> plan =
          lower_with_kernel(problem, backend, kernel, request.workspace, ignored);
      // One that wants memory which the caller has not got may be as fast as it likes.
      const bool affordable = plan && (request.workspace == WorkspaceUse::kFree ||
                                       plan->workspace_bytes <= draft.workspace_bytes());
      if (affordable) {
        plan->source = PlanSource::kTuned;
        return *std::move(plan);
      }
      // A bucket holds many problems: what won for one of them may not run another. Nothing is left
      // to be measured.
      source = PlanSource::kTuned;
    }
  }
  draft = gathering_first(std::move(draft), backend, request.workspace);
  const int kernel = backend.choose(draft.product());
  return with_kernel(std::move(draft), backend, kernel, source,
                     "first of those that run it, by measured borders");
}

void add_reason(std::string& reasons, const Backend& backend, const std::string& reason) {
  reasons += join(reasons.empty() ? "" : "; ", to_string(backend.kind()), ": ", reason);
}

Planned lower_named(const Problem& problem, const PlanRequest& request,
                    std::span<const Backend* const> backends) {
  const std::string& name = request.config->kernel;
  std::string reasons;
  for (const Backend* backend : backends) {
    if (request.backend && backend->kind() != *request.backend) continue;
    const int kernel = position_of(*backend, name);
    if (kernel < 0) continue;
    std::string reason = backend->unavailable(problem.device);
    if (reason.empty()) {
      std::optional<Draft> draft = form_for(problem, *backend, kernel, request.workspace, reason);
      if (draft) {
        return {backend,
                with_kernel(*std::move(draft), *backend, kernel, PlanSource::kManual, "asked for")};
      }
    }
    add_reason(reasons, *backend, reason);
  }
  if (reasons.empty()) {
    refuse_value("config.kernel is '", name, "'; no ",
                 request.backend ? to_string(*request.backend) : "compiled",
                 " kernel has that name (`moegemm info --kernels` lists them)");
  }
  refuse_value("config.kernel is '", name, "', which does not run ", to_string(problem), " (",
               reasons, ")");
}

[[noreturn]] void refuse_everywhere(const Problem& problem, const PlanRequest& request,
                                    std::string reasons) {
  if (reasons.empty()) reasons = "not compiled into this library";
  const std::string who = request.backend
                              ? join("backend ", to_string(*request.backend), " does not run ")
                              : std::string("no backend runs ");
  throw Error(ErrorKind::kNotImplemented, join(who, to_string(problem), " (", reasons, ")"));
}

/// The first backend that runs any form of the problem, with the better one of those. Only the
/// backend that is best for the product counts: a lesser one that does all in one kernel would not
/// make up for it. `spare` leaves out what takes workspace.
std::optional<Planned> lower_on_best(const Problem& problem, const PlanRequest& request,
                                     std::span<const Backend* const> backends,
                                     const TunedKernel& tuned, bool spare, std::string& reasons) {
  for (const Backend* backend : backends) {
    if (request.backend && backend->kind() != *request.backend) continue;
    std::string reason = backend->unavailable(problem.device);
    if (!reason.empty()) {
      add_reason(reasons, *backend, reason);
      continue;
    }
    Forms forms = forms_of(problem, *backend, request.workspace);
    for (Draft& form : forms) {
      if (spare && form.workspace_bytes() > 0) continue;
      std::string refusal = why_not(*backend, form.product());
      if (refusal.empty()) {
        return Planned{backend, with_best(problem, std::move(form), *backend, request, tuned)};
      }
      if (reason.empty() || form.has_pass()) reason = std::move(refusal);
    }
    add_reason(reasons, *backend, reason);
  }
  return std::nullopt;
}

}  // namespace

std::optional<Plan> lower_with_kernel(const Problem& problem, const Backend& backend, int kernel,
                                      WorkspaceUse workspace, std::string& why_not) {
  std::optional<Draft> draft = form_for(problem, backend, kernel, workspace, why_not);
  if (!draft) return std::nullopt;
  Draft gathered = gathering_first(*draft, backend, workspace);
  const bool in_order = backend.refuse(gathered.product(), backend.kernels()[kernel]).empty();
  return with_kernel(in_order ? std::move(gathered) : *std::move(draft), backend, kernel,
                     PlanSource::kHeuristic, "it was the fastest when measured");
}

Planned lower(const Problem& problem, const PlanRequest& request,
              std::span<const Backend* const> backends, const TunedKernel& tuned) {
  if (request.config && !request.config->kernel.empty()) {
    return lower_named(problem, request, backends);
  }
  std::string reasons;
  if (request.workspace == WorkspaceUse::kAvoid) {
    std::optional<Planned> planned =
        lower_on_best(problem, request, backends, tuned, true, reasons);
    if (planned) return *std::move(planned);
    reasons.clear();
  }
  std::optional<Planned> planned = lower_on_best(problem, request, backends, tuned, false, reasons);
  if (!planned) refuse_everywhere(problem, request, std::move(reasons));
  return *std::move(planned);
}

}  // namespace moegemm
