#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "commands/commands.h"
#include "commands/expert_parallel_plan.h"
#include "commands/plan_picture.h"
#include "layer/layer_run.h"
#include "layer_options.h"
#include "moegemm/error.h"
#include "moegemm/execution.h"
#include "moegemm/info.h"
#include "moegemm/plan.h"
#include "output/json.h"
#include "output/report.h"
#include "program.h"

namespace moegemm::cli {
namespace {

constexpr std::int64_t kMostRanks = 1'000'000;

struct PlanOptions {
  explicit PlanOptions(CLI::App& command) : layer(command, false) {}

  LayerOptions layer;
  std::string gpu;
  bool autotune = false;
  std::string plot;
  ExpertParallelOptions experts;
};

/// "412 GFLOP", "1.04 GB": three digits and the prefix that suits.
std::string amount(double value, const char* unit) {
  const char* prefixes[] = {"", "K", "M", "G", "T", "P"};
  int i = 0;
  for (; value >= 1000 && i < 5; ++i) value /= 1000;
  return fmt::format("{:.3g} {}{}", value, prefixes[i], unit);
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
                  cost.limit(), duration_text(cost.compute_us), amount(cost.flops, "FLOP"),
                  amount(explained.limits.flops_per_second, "FLOP"), cost.tiles, cost.waves,
                  duration_text(cost.memory_us), amount(cost.bytes, "B"),
                  amount(explained.limits.bytes_per_second, "B"));
  if (cost.tile_load_us > 0)
    text += fmt::format(", tile loads {}", duration_text(cost.tile_load_us));
  return text;
}

/// Every launch in its order, and why it is there.
std::string steps_text(const Plan& plan) {
  std::string text;
  int number = 0;
  for (const Step& step : plan.steps) {
    text += fmt::format("  step {} {}\n", ++number, to_string(step));
    if (step.first_feature == 0) text += fmt::format("         because: {}\n", step.reason);
  }
  if (!plan.note.empty()) text += fmt::format("  note   {}\n", plan.note);
  if (plan.workspace_bytes > 0) {
    text += fmt::format("  memory {} of workspace\n",
                        amount(static_cast<double>(plan.workspace_bytes), "B"));
  }
  return text;
}

/// Who decodes a quantised W, and what of it crosses memory.
std::string weights_text(const PlannedProduct& product) {
  const Quantization& quantization = product.problem.quantization;
  if (quantization.plain()) return {};
  const bool pass = product.explained.plan.has(StepKind::kDequantise);
  const Problem& p = product.problem;
  const auto experts = static_cast<double>(p.experts);
  return fmt::format(
      "  W      {}: {} of packed values and scales ({} in {}), decoded {}\n",
      to_string(quantization),
      amount(experts * static_cast<double>(quantization.stored_bytes(p.n, p.k)), "B"),
      amount(experts * static_cast<double>(p.n) * static_cast<double>(p.k) *
                 static_cast<double>(size_bytes(p.dtype)),
             "B"),
      to_string(p.dtype),
      pass ? std::string("by a pass into the workspace")
           : fmt::format("inside the product by {}", product.explained.plan.product().kernel_name));
}

std::string product_text(const PlannedProduct& product) {
  const PlanExplanation& explained = product.explained;
  std::string text = fmt::format("{}: {}\n", product.name, to_string(product.problem)) +
                     steps_text(explained.plan) + weights_text(product) +
                     fmt::format("  limit  {}\n", limit_text(explained));
  for (const std::string& backend : explained.not_available) {
    text += fmt::format("  not    {}\n", backend);
  }
  std::vector<std::vector<std::string>> rows;
  for (const PlanCandidate& candidate : explained.candidates) {
    const bool predicted = candidate.refused.empty() && candidate.cost.total_us > 0;
    rows.push_back({candidate.chosen ? "->" : "", candidate.kernel.name,
                    predicted ? duration_text(candidate.cost.total_us) : "",
                    predicted ? fmt::format("{:.2f}", candidate.cost.waves) : "",
                    (candidate.refused.empty() ? "" : "refused: ") + candidate.remark});
  }
  return text + format_table({"", "kernel", "predicted", "waves", "why"}, rows,
                             {false, false, true, true, false});
}

nlohmann::json product_json(const PlannedProduct& product) {
  const PlanExplanation& explained = product.explained;
  return {{"op", product.name},
          {"problem", product.problem},
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
      throw Error(
          ErrorKind::kNotImplemented,
          fmt::format(
              "--gpu {}: no CUDA kernels are compiled in; `make build CUDA=ON` compiles them",
              options.gpu));
    }
  } else if (spec.device.type == DeviceType::kCuda && gpus(&why_none).empty()) {
    throw Error(ErrorKind::kRuntime,
                fmt::format("--device {}: {}; --gpu plans for one that is not here: {}",
                            to_string(spec.device), why_none, fmt::join(planning_gpus(), ", ")));
  }
  return spec;
}

/// Everything that `moegemm plan` says.
struct PlanReport {
  LayerSpec spec;
  std::vector<PlannedProduct> products;

  std::string headline() const {
    return fmt::format(
        "{}: {} experts, top {}, hidden {}, intermediate {}; {} tokens, {:.1f} rows per expert{}",
        spec.name, spec.experts, spec.topk, spec.hidden, spec.intermediate, spec.tokens,
        static_cast<double>(spec.rows()) / static_cast<double>(spec.experts),
        is_batch_invariant()
            ? ""
            : "; kernels with an order of sums of their own are admitted (there is none)");
  }
  std::string text() const {
    std::string text = headline() + "\n";
    for (const PlannedProduct& product : products) text += "\n" + product_text(product);
    return text + "\n";
  }
  nlohmann::json json() const {
    nlohmann::json plans = nlohmann::json::array();
    for (const PlannedProduct& product : products) plans.push_back(product_json(product));
    return {{"layer", spec}, {"batch_invariant", is_batch_invariant()}, {"plans", plans}};
  }
  std::string svg() const {
    return plan_svg(fmt::format("{}, {} on {}", headline(), to_string(spec.dtype),
                                to_string(products.front().problem.device)),
                    products);
  }
};

PlanReport plan_layer(const PlanOptions& options) {
  PlanReport report{layer_to_plan(options), {}};
  const LayerSpec& spec = report.spec;
  for (const LayerGemm gemm : {LayerGemm::kFirst, LayerGemm::kSecond}) {
    for (const Op op : trained_ops(spec)) {
      const Problem problem = layer_problem(spec, gemm, op);
      report.products.push_back(
          {fmt::format("{} {}", to_string(op), gemm == LayerGemm::kFirst ? 1 : 2), problem,
           explain(problem, spec.backend, {}, options.autotune)});
    }
  }
  return report;
}

/// What is wrong with the name of a picture; empty: nothing.
std::string refuse_other_pictures(const std::string& path) {
  const std::string suffix = std::filesystem::path(path).extension();
  if (suffix.empty() || suffix == ".svg") return {};
  return fmt::format("{}: the picture is an SVG; a name that ends in .svg is accepted", path);
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) {
    throw Error(ErrorKind::kRuntime,
                fmt::format("--plot {}: cannot be written: {}", path, std::strerror(errno)));
  }
}

int print_expert_parallel(const PlanOptions& options) {
  const LayerSpec spec = options.layer.layer();
  const ExpertParallelPlan plan = plan_expert_parallel(spec, options.experts);
  if (options.layer.json()) {
    print_json({{"layer", spec}, {"expert_parallel", plan.json()}});
  } else {
    fmt::print("{}\n{}", PlanReport{spec, {}}.headline(), plan.text());
  }
  return kSuccess;
}

int print_plans(const PlanOptions& options) {
  if (options.experts.ranks > 0) return print_expert_parallel(options);
  const PlanReport report = plan_layer(options);
  if (options.layer.json()) {
    print_json(report.json());
  } else {
    fmt::print("{}", report.text());
  }
  if (!options.plot.empty()) {
    write_file(options.plot, report.svg());
    fmt::print(stderr, "{}\n", options.plot);
  }
  return kSuccess;
}

std::shared_ptr<PlanOptions> declare_options(CLI::App& command) {
  auto options = std::make_shared<PlanOptions>(command);
  CLI::Option* gpu = command
                         .add_option("--gpu", options->gpu,
                                     fmt::format("Plan for a GPU that need not be here: {}",
                                                 fmt::join(planning_gpus(), ", ")))
                         ->check(CLI::IsMember(planning_gpus()))
                         ->type_name("NAME");
  // Measurements are of this machine's devices.
  CLI::Option* autotune =
      command.add_flag("--autotune", options->autotune, "Plan as calls with autotune=True do")
          ->excludes(gpu);
  CLI::Option* plot =
      command
          .add_option("--plot", options->plot,
                      "Draw the predictions under the roofline of the device, as SVG, to this file")
          ->check(refuse_other_pictures)
          ->type_name("FILE");
  CLI::Option* ranks =
      command
          .add_option("--expert-parallel", options->experts.ranks,
                      "Estimate a layer whose experts are spread over so many GPUs instead")
          ->transform(whole_number(1, kMostRanks))
          ->type_name("N");
  // The estimate is of one kind of GPU and of plain weights.
  for (CLI::Option* other : {gpu, autotune, plot}) ranks->excludes(other);
  for (const char* other : {"--device", "--backend", "--weights"}) {
    ranks->excludes(command.get_option(other));
  }
  command.add_option("--nodes", options->experts.nodes, "With --expert-parallel: on so many nodes")
      ->transform(whole_number(1, kMostRanks))
      ->type_name("N")
      ->needs(ranks);
  command
      .add_option("--link", options->experts.link_gb_per_second,
                  "With --expert-parallel: GB/s that a GPU gets in an exchange; 360 inside a node "
                  "and 45 between nodes unless given")
      ->check(number(0.001, 1e6))
      ->type_name("GB/s")
      ->needs(ranks);
  return options;
}

}  // namespace

Command add_plan_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "plan",
      "Show the launches that each product of a layer would take and the reason of each, what\n"
      "limits the product and why every other kernel lost or cannot run it, without running\n"
      "anything.");
  const std::shared_ptr<PlanOptions> options = declare_options(*command);
  return [options] { return print_plans(*options); };
}

std::string plan_document(std::vector<std::string> arguments) {
  CLI::App command("", "plan");
  const std::shared_ptr<PlanOptions> options = declare_options(command);
  try {
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes them
    command.parse(arguments);
    for (const char* other : {"--expert-parallel", "--plot"}) {
      if (command.count(other) != 0) {
        throw CLI::ValidationError(other, "only the program takes it");
      }
    }
    const PlanReport report = plan_layer(*options);
    nlohmann::json document = report.json();
    document.update({{"text", report.text()}, {"svg", report.svg()}});
    return to_text(document);
  } catch (const CLI::ParseError& error) {
    throw Error(ErrorKind::kInvalidValue, error.what());
  }
}

}  // namespace moegemm::cli
