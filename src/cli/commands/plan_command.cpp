#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>

#include "commands/commands.h"
#include "json.h"
#include "layer/layer_run.h"
#include "layer_options.h"
#include "moegemm/error.h"
#include "moegemm/explain.h"
#include "moegemm/info.h"
#include "moegemm/planning_gpus.h"
#include "report.h"

namespace moegemm::cli {
namespace {

struct PlanOptions {
  explicit PlanOptions(CLI::App& command) : layer(command, false) {}

  LayerOptions layer;
  std::string gpu;
  bool autotune = false;
};

/// "412 GFLOP", "1.04 GB": three digits and the prefix that suits.
std::string amount(double value, const char* unit) {
  const char* prefixes[] = {"", "K", "M", "G", "T", "P"};
  int i = 0;
  for (; value >= 1000 && i < 5; ++i) value /= 1000;
  return fmt::format("{:.3g} {}{}", value, prefixes[i], unit);
}

std::string duration(double us) {
  return us < 1000 ? fmt::format("{:.1f} us", us) : fmt::format("{:.2f} ms", us / 1000);
}

/// What bounds the chosen kernel, with the numbers.
std::string limit_text(const PlanExplanation& explained) {
  const CostEstimate& cost = explained.cost;
  if (cost.total_us <= 0) {
    return fmt::format("{}, {}; this backend predicts no times", amount(cost.flops, "FLOP"),
                       amount(cost.bytes, "B"));
  }
  std::string text =
      fmt::format("{}: compute {} ({} at {}/s, {:.0f} tiles, {:.2f} waves), memory {} ({} at {}/s)",
                  cost.limit(), duration(cost.compute_us), amount(cost.flops, "FLOP"),
                  amount(explained.limits.flops_per_second, "FLOP"), cost.tiles, cost.waves,
                  duration(cost.memory_us), amount(cost.bytes, "B"),
                  amount(explained.limits.bytes_per_second, "B"));
  if (cost.tile_load_us > 0) text += fmt::format(", tile loads {}", duration(cost.tile_load_us));
  return text;
}

/// Every launch in its order, and why it is there.
void print_steps(const Plan& plan) {
  int number = 0;
  for (const Step& step : plan.steps) {
    fmt::print("  step {} {}\n         because: {}\n", ++number, to_string(step), step.reason);
  }
  if (!plan.note.empty()) fmt::print("  note   {}\n", plan.note);
  if (plan.workspace_bytes > 0) {
    fmt::print("  memory {} of workspace\n",
               amount(static_cast<double>(plan.workspace_bytes), "B"));
  }
}

void print_product(const std::string& op, const Problem& problem,
                   const PlanExplanation& explained) {
  fmt::print("{}: {}\n", op, to_string(problem));
  print_steps(explained.plan);
  fmt::print("  limit  {}\n", limit_text(explained));
  for (const std::string& backend : explained.not_available) fmt::print("  not    {}\n", backend);
  std::vector<std::vector<std::string>> rows;
  for (const PlanCandidate& candidate : explained.candidates) {
    const bool predicted = candidate.refused.empty() && candidate.cost.total_us > 0;
    rows.push_back({candidate.chosen ? "->" : "", candidate.kernel.name,
                    predicted ? duration(candidate.cost.total_us) : "",
                    predicted ? fmt::format("{:.2f}", candidate.cost.waves) : "",
                    (candidate.refused.empty() ? "" : "refused: ") + candidate.remark});
  }
  fmt::print("{}\n", format_table({"", "kernel", "predicted", "waves", "why"}, rows,
                                  {false, false, true, true, false}));
}

nlohmann::json product_json(const std::string& op, const Problem& problem,
                            const PlanExplanation& explained) {
  return {{"op", op},
          {"problem", problem},
          {"plan", explained.plan},
          {"limit", explained.cost.limit()},
          {"cost", explained.cost},
          {"candidates", explained.candidates},
          {"not_available", explained.not_available}};
}

/// The layer on the GPU that was named, or on a device of this machine.
LayerSpec layer_to_plan(const PlanOptions& options) {
  LayerSpec spec = options.layer.layer();
  std::string why_none;
  if (!options.gpu.empty()) {
    spec.device = *planning_gpu(options.gpu);
    const std::vector<KernelInfo> compiled = kernels();
    if (std::none_of(compiled.begin(), compiled.end(),
                     [](const KernelInfo& k) { return k.backend == BackendKind::kSm80; })) {
      throw Error(ErrorKind::kNotImplemented,
                  fmt::format("--gpu {}: no CUDA kernels are compiled in", options.gpu));
    }
  } else if (spec.device.type == DeviceType::kCuda && gpus(&why_none).empty()) {
    throw Error(ErrorKind::kRuntime,
                fmt::format("--device {}: {}; --gpu plans for one that is not here: {}",
                            to_string(spec.device), why_none, fmt::join(planning_gpus(), ", ")));
  }
  return spec;
}

int print_plans(const PlanOptions& options) {
  const LayerSpec spec = layer_to_plan(options);
  nlohmann::json plans = nlohmann::json::array();
  if (!options.layer.json()) {
    fmt::print(
        "{}: {} experts, top {}, hidden {}, intermediate {}; {} tokens, {:.1f} rows per "
        "expert\n\n",
        spec.name, spec.experts, spec.topk, spec.hidden, spec.intermediate, spec.tokens,
        static_cast<double>(spec.rows()) / static_cast<double>(spec.experts));
  }
  for (const LayerGemm gemm : {LayerGemm::kFirst, LayerGemm::kSecond}) {
    for (const Op op : {Op::kForward, Op::kDx, Op::kDw}) {
      const Problem problem = layer_problem(spec, gemm, op);
      const PlanExplanation explained = explain(problem, spec.backend, {}, options.autotune);
      const std::string name =
          fmt::format("{} {}", to_string(op), gemm == LayerGemm::kFirst ? 1 : 2);
      if (options.layer.json()) {
        plans.push_back(product_json(name, problem, explained));
      } else {
        print_product(name, problem, explained);
      }
    }
  }
  if (options.layer.json()) print_json({{"layer", spec}, {"plans", plans}});
  return kSuccess;
}

}  // namespace

Command add_plan_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "plan",
      "Show the launches that each product of a layer would take and the reason of each, what\n"
      "limits the product and why every other kernel lost or cannot run it, without running\n"
      "anything.");
  auto options = std::make_shared<PlanOptions>(*command);
  CLI::Option* gpu = command
                         ->add_option("--gpu", options->gpu,
                                      fmt::format("Plan for a GPU that need not be here: {}",
                                                  fmt::join(planning_gpus(), ", ")))
                         ->check(CLI::IsMember(planning_gpus()))
                         ->type_name("NAME");
  // Measurements are of this machine's devices.
  command->add_flag("--autotune", options->autotune, "Plan as calls with autotune=True do")
      ->excludes(gpu);
  return [options] { return print_plans(*options); };
}

}  // namespace moegemm::cli
