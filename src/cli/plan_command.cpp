#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "layer/layer_run.h"
#include "layer_options.h"
#include "moegemm/ops.h"
#include "report.h"

namespace moegemm::cli {
namespace {

struct PlanOptions {
  std::unique_ptr<LayerOptions> layer;
  bool json = false;
};

int print_plans(const PlanOptions& options) {
  const LayerSpec spec = options.layer->layer();
  nlohmann::json plans = nlohmann::json::array();
  std::vector<std::vector<std::string>> rows;
  for (const LayerGemm gemm : {LayerGemm::kFirst, LayerGemm::kSecond}) {
    for (const Op op : {Op::kForward, Op::kDx, Op::kDw}) {
      const Problem problem = layer_problem(spec, gemm, op);
      const Plan chosen = plan(problem, spec.backend);
      plans.push_back({{"problem", to_json(problem)}, {"plan", to_json(chosen)}});
      rows.push_back({fmt::format("{} {}", to_string(op), gemm == LayerGemm::kFirst ? 1 : 2),
                      fmt::format("{} x {} x {}", problem.rows, problem.n, problem.k),
                      plan_summary(chosen), std::to_string(chosen.stages),
                      std::to_string(chosen.grid), to_string(chosen.source)});
    }
  }
  if (options.json) {
    fmt::print("{}\n", nlohmann::json{{"layer", to_json(spec)}, {"plans", plans}}.dump(2));
  } else {
    fmt::print("{}", format_table({"op", "M x N x K", "plan", "stages", "grid", "source"}, rows,
                                  {false, false, false, true, true, false}));
  }
  return kSuccess;
}

}  // namespace

Command add_plan_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "plan", "Show which kernel each product of a layer would get, without running it.");
  auto options = std::make_shared<PlanOptions>();
  options->layer = std::make_unique<LayerOptions>(*command);
  command->add_flag("--json", options->json, "Print the plans as JSON");
  return [options] { return print_plans(*options); };
}

}  // namespace moegemm::cli
