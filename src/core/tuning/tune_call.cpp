#include "core/tuning/tune_call.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <utility>

#include "core/planning/cost.h"
#include "core/planning/passes.h"
#include "core/planning/stored_form.h"
#include "core/process/environment.h"
#include "core/refusal.h"
#include "core/run.h"
#include "core/tuning/cache/store.h"
#include "core/validation/routing_data.h"

namespace moegemm {
namespace {

/// The prediction tells good from hopeless, not first from second: of the kernels compiled for an
/// H200 none that was predicted to take this many times the least has ever been the fastest.
constexpr double kPruneFactor = 2.0;

/// One measurement at a time: two on one device would time each other.
std::mutex& tuning_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

/// This thread's measurement has called its caller back, and waits.
thread_local bool measuring = false;

/// What a measurement holds: the turn of this process, given up while the caller is told of the
/// progress. The caller may well wait there for another thread that wants to measure.
class Turn final : public TuningSupport {
 public:
  explicit Turn(TuningSupport& caller) : caller_(caller), lock_(tuning_mutex()) {
    budget_seconds = caller.budget_seconds;
  }

  void* allocate(std::int64_t bytes, Device device) override {
    return caller_.allocate(bytes, device);
  }
  bool progress(const TuneProgress& now) override {
    struct Pause {
      explicit Pause(std::unique_lock<std::mutex>& held) : lock(held) {
        lock.unlock();
        measuring = true;
      }
      ~Pause() {
        measuring = false;
        lock.lock();
      }
      std::unique_lock<std::mutex>& lock;
    };
    const Pause pause(lock_);
    return caller_.progress(now);
  }

 private:
  TuningSupport& caller_;
  std::unique_lock<std::mutex> lock_;
};

/// Why nothing may be measured; empty if it may.
std::string why_not_now(const Problem& problem, const ExecutionContext& context) {
  if (measuring) return "this thread is measuring already";
  if (!environment_allows_tuning()) return "MOEGEMM_AUTOTUNE is 0";
  if (is_capturing(problem.device, context)) return "a CUDA graph is being captured";
  if (problem.rows == 0) return "there are no rows";
  return {};
}

/// The heuristic's kernel stays, for `report.why_not`, until somebody spends more than `budget` on
/// it.
void settle(const Backend& backend, const TuneReport& report, double budget) {
  const std::string& kernel = report.plan.product().kernel_name;
  tuning_store().settle(tuning_key(report.problem, backend),
                        {{kernel, 0, kernel, 0}, report.why_not, budget});
  process_planner().forget_plans();
}

void remember(const Backend& backend, TuneReport& report) {
  const auto heuristic = std::find_if(report.candidates.begin(), report.candidates.end(),
                                      [](const TuneCandidate& c) { return c.launches > 0; });
  const auto winner = std::find_if(
      report.candidates.begin(), report.candidates.end(),
      [&](const auto& candidate) { return candidate.kernel == report.plan.product().kernel_name; });
  report.not_saved = tuning_store().put(
      {{tuning_key(report.problem, backend),
        {winner->kernel, winner->median_us, heuristic->kernel, heuristic->median_us}}});
  process_planner().forget_plans();
}

/// Measures `call` into borrowed memory and remembers the result.
TuneReport measure_call(const Planned& planned, const Call& call, const ExecutionContext& context) {
  const Backend& backend = *planned.backend;
  TuneReport report;
  report.problem = call.problem;
  report.plan = planned.plan;
  report.why_not = why_not_now(call.problem, context);
  if (!report.why_not.empty()) return report;

  const WorkspaceUse use = workspace_use(call.problem, context);
  const Plan first = plan_problem(call.problem, backend.kind(), {}, false, use).plan;
  TuneField field = choose_field(backend, call.problem, first.product().kernel, use);
  if (field.plans.size() < 2) {
    report.candidates = std::move(field.candidates);
    report.why_not = "there is no other kernel to compare with";
    settle(backend, report, std::numeric_limits<double>::infinity());
    return report;
  }
  const Device device = call.problem.device;
  auto rotation = OperandRotation::borrow(call, field.workspace_bytes(), cache_sizes(device),
                                          context, *context.tuning);
  if (!rotation) {
    report.why_not = "there is no memory for the outputs of timed launches";
    return report;
  }
  const auto stopwatch = make_stopwatch(device, context, rotation->flush());
  report = measure(backend, call.problem, std::move(field), *rotation, *stopwatch, context);
  if (!report.measured) report.plan = first;
  if (report.measured) {
    remember(backend, report);
  } else if (!report.interrupted) {
    const double budget = context.tuning->budget_seconds;
    report.why_not = join("loading the kernels took the whole budget of ", budget,
                          " s, so that the heuristic's stays");
    settle(backend, report, budget);
  }
  return report;
}

/// What to say of a problem that nobody has to measure; nothing if somebody has to.
std::optional<TuneReport> known(const Planned& planned, const Problem& problem, double budget) {
  const TuningKey key = tuning_key(problem, *planned.backend);
  if (planned.plan.source != PlanSource::kTuned) return std::nullopt;
  TuneReport report;
  report.problem = problem;
  report.plan = planned.plan;
  if (const auto settled = tuning_store().find_settled(key)) {
    if (budget > settled->budget_seconds) return std::nullopt;
    report.why_not = settled->why;
  }
  return report;
}

TuneReport tune(const Call& call, const GemmOptions& options, const ExecutionContext& context,
                bool again) {
  if (context.tuning == nullptr) {
    refuse_value("context.tuning is null; a measurement needs the memory that it lends");
  }
  if (!(context.tuning->budget_seconds > 0)) {
    refuse_value("budget_seconds is ", context.tuning->budget_seconds, "; it must be above 0");
  }
  if (options.config) refuse_value("options.config is given; there is nothing left to measure");
  const WorkspaceUse use = workspace_use(call.problem, context);
  if (measuring) {
    TuneReport report;
    report.problem = call.problem;
    report.plan = plan_problem(call.problem, options.backend, {}, true, use).plan;
    report.why_not = why_not_now(call.problem, context);
    return report;
  }
  Turn turn(*context.tuning);
  const Planned planned = plan_problem(call.problem, options.backend, {}, true, use);
  if (!again) {
    if (auto report = known(planned, call.problem, turn.budget_seconds)) return *std::move(report);
  }
  ExecutionContext in_turn = context;
  in_turn.tuning = &turn;
  return measure_call(planned, call, in_turn);
}

}  // namespace

void renew_tuning_turn() { new (&tuning_mutex()) std::mutex; }

std::int64_t TuneField::workspace_bytes() const {
  std::int64_t most = 0;
  for (const Plan& plan : plans) most = std::max(most, plan.workspace_bytes);
  return most;
}

TuneField choose_field(const Backend& backend, const Problem& problem, int first,
                       WorkspaceUse workspace) {
  struct Runner {
    Plan plan;
    double us;
  };
  const auto kernels = backend.kernels();
  std::vector<Runner> feasible;
  TuneField field;
  std::vector<TuneCandidate> left_out;
  for (int i = 0; i < static_cast<int>(kernels.size()); ++i) {
    if (kernels[i].op != problem.op) continue;
    std::string refusal;
    std::optional<Plan> plan = lower_with_kernel(problem, backend, i, workspace, refusal);
    if (plan) {
      const Problem product = product_of(*plan, problem);
      const double us = estimate_cost(product, kernels[i], backend.limits(product)).total_us;
      feasible.push_back({*std::move(plan), us});
    } else {
      left_out.push_back({kernels[i].name, 0, 0, 0, "refused: " + refusal});
    }
  }
  const auto is_first = [&](const Runner& runner) { return runner.plan.product().kernel == first; };
  std::stable_sort(feasible.begin(), feasible.end(), [&](const Runner& a, const Runner& b) {
    if (is_first(a) != is_first(b)) return is_first(a);
    return a.us < b.us;
  });
  double least = feasible.front().us;
  for (const Runner& runner : feasible) least = std::min(least, runner.us);
  for (Runner& runner : feasible) {
    const std::string& kernel = runner.plan.product().kernel_name;
    if (!is_first(runner) && runner.us > kPruneFactor * least) {
      left_out.push_back(
          {kernel, runner.us, 0, 0,
           join("pruned: predicted to take ", runner.us / least, " times as long as the best")});
      continue;
    }
    field.candidates.push_back({kernel, runner.us, 0, 0, {}});
    field.plans.push_back(std::move(runner.plan));
  }
  field.candidates.insert(field.candidates.end(), left_out.begin(), left_out.end());
  return field;
}

TuneReport measure(const Backend& backend, const Problem& problem, TuneField field,
                   OperandRotation& rotation, Stopwatch& stopwatch,
                   const ExecutionContext& context) {
  std::vector<Planned> plans;
  std::vector<std::string> names;
  for (const Plan& plan : field.plans) {
    plans.push_back({&backend, plan});
    names.push_back(plan.product().kernel_name);
  }
  RaceRules rules;
  rules.budget_seconds = context.tuning->budget_seconds;
  const std::string nobody;
  const RaceResult result = race(
      names,
      [&](int i) {
        run_steps(plans[i], {problem, rotation.next()}, rotation.workspace(), context);
      },
      stopwatch, rules,
      [&](const RaceView& view) {
        const bool found = view.best >= 0;
        return context.tuning->progress(
            {problem, names[view.next], view.next + 1, static_cast<int>(names.size()),
             found ? names[view.best] : nobody, found ? view.entrants[view.best].median_us() : 0,
             view.done, view.seconds_left});
      });

  TuneReport report;
  report.problem = problem;
  report.seconds = result.seconds;
  report.operand_sets = rotation.sets();
  report.flushed = rotation.flush() != nullptr;
  report.memory_bytes = rotation.memory_bytes();
  report.interrupted = result.interrupted;
  // Out of time with one kernel timed is a result too: the next call must not spend the time again.
  const auto timed = std::count_if(result.entrants.begin(), result.entrants.end(),
                                   [](const RaceEntrant& e) { return !e.us.empty(); });
  report.measured = timed >= (result.interrupted ? 2 : 1);
  const int winner = report.measured ? result.winner : 0;
  report.plan = plans[winner].plan;
  report.plan.source = report.measured ? PlanSource::kTuned : PlanSource::kHeuristic;
  for (std::size_t i = 0; i < result.entrants.size(); ++i) {
    const RaceEntrant& entrant = result.entrants[i];
    TuneCandidate& candidate = field.candidates[i];
    candidate.median_us = entrant.median_us();
    candidate.launches = static_cast<int>(entrant.us.size());
    candidate.outcome = entrant.us.empty()              ? "not reached"
                        : static_cast<int>(i) == winner ? "fastest"
                        : entrant.given_up              ? "given up: too slow"
                                                        : "slower";
  }
  report.candidates = std::move(field.candidates);
  return report;
}

Planned tune_unknown(const Call& call, const GemmOptions& options,
                     const ExecutionContext& context) {
  if (why_not_now(call.problem, context).empty()) {
    static_cast<void>(tune(call, options, context, false));
  }
  return plan_problem(call.problem, options.backend, options.config, true,
                      workspace_use(call.problem, context));
}

TuneReport tune(const Description& description, const TensorView& first, const TensorView& second,
                const TensorView& out, const RoutingView& routing, const GemmOptions& options,
                const ExecutionContext& context, bool again) {
  const Call call = in_stored_form(place(description, first, second, out, routing, options));
  if (options.check || environment_of_call().check()) check_routing(call.problem, routing, context);
  return tune(call, options, context, again);
}

TuneReport tune_forward(const TensorView& x, const TensorView& w, const TensorView& y,
                        const RoutingView& routing, const GemmOptions& options,
                        const ExecutionContext& context, bool again) {
  return tune(described(Op::kForward, x, w, y, routing, options), x, w, y, routing, options,
              context, again);
}

TuneReport tune_dx(const TensorView& dy, const TensorView& w, const TensorView& dx,
                   const RoutingView& routing, const GemmOptions& options,
                   const ExecutionContext& context, bool again) {
  return tune(described(Op::kDx, dy, w, dx, routing, options), dy, w, dx, routing, options, context,
              again);
}

TuneReport tune_dw(const TensorView& dy, const TensorView& x, const TensorView& dw,
                   const RoutingView& routing, const GemmOptions& options,
                   const ExecutionContext& context, bool again) {
  return tune(described(Op::kDw, dy, x, dw, routing, options), dy, x, dw, routing, options, context,
              again);
}

std::string tuning_cache_path() { return tuning_store().path().string(); }

std::vector<TunedEntry> tuning_cache_entries() {
  std::vector<TunedEntry> entries;
  for (const auto& [key, record] : tuning_store().all()) {
    entries.push_back({key.device, key.version, key.kernel_set, key.problem, record.kernel,
                       record.us, record.heuristic, record.heuristic_us});
  }
  return entries;
}

std::size_t clear_tuning_cache() {
  const std::size_t count = tuning_store().clear();
  process_planner().forget_plans();
  return count;
}

std::string export_tuning_cache() { return to_json_text(tuning_store().all()); }

std::size_t import_tuning_cache(const std::string& text) {
  TunedRecords records;
  try {
    records = parse_json_text(text);
  } catch (const std::runtime_error& error) {
    refuse_value("the text to import is no tuning cache: ", error.what());
  }
  const std::string failure = tuning_store().put(records);
  process_planner().forget_plans();
  if (!failure.empty()) {
    throw Error(ErrorKind::kRuntime, join("the imported measurements are not saved: ", failure));
  }
  return records.size();
}

}  // namespace moegemm
