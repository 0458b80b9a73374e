#include "output/json.h"

#include <fmt/format.h>

#include "output/report.h"

namespace moegemm {

void to_json(nlohmann::json& json, const TileShape& tile) {
  json = {{"rows", tile.rows}, {"cols", tile.columns}, {"depth", tile.depth}};
}

void to_json(nlohmann::json& json, const Step& step) {
  json = {{"kind", to_string(step.kind)},
          {"reason", step.reason},
          {"workspace_offset", step.workspace_offset}};
  if (step.features > 0) {
    json.update({{"first_feature", step.first_feature}, {"features", step.features}});
  }
  if (step.kind == StepKind::kProduct) {
    json.update({{"backend", to_string(step.backend)},
                 {"kernel", step.kernel_name},
                 {"tile", step.tile},
                 {"stages", step.stages},
                 {"grid", step.grid},
                 {"order", to_string(step.order)},
                 {"weights_pass_through", step.weights == WeightCaching::kPassThrough},
                 {"start", to_string(step.start)}});
  }
}

void to_json(nlohmann::json& json, const Plan& plan) {
  const Step& product = plan.product();
  json = {{"backend", to_string(product.backend)},
          {"kernel", product.kernel_name},
          {"tile", product.tile},
          {"stages", product.stages},
          {"grid", product.grid},
          {"steps", std::vector<Step>(plan.steps.begin(), plan.steps.end())},
          {"workspace_bytes", plan.workspace_bytes},
          {"source", to_string(plan.source)},
          {"note", plan.note},
          {"text", to_string(plan)}};
}

void to_json(nlohmann::json& json, const Problem& problem) {
  json = {{"op", to_string(problem.op)},
          {"dtype", to_string(problem.dtype)},
          {"experts", problem.experts},
          {"n", problem.n},
          {"k", problem.k},
          {"rows", problem.rows},
          {"topk", problem.topk},
          {"permutation", to_string(problem.permutation)},
          {"multiply", problem.multiply},
          {"device", to_string(problem.device)},
          {"text", to_string(problem)}};
}

void to_json(nlohmann::json& json, const CpuInfo& cpu) {
  json = {{"model", cpu.model}, {"threads", cpu.threads}, {"isa", cpu.isa}, {"isas", cpu.isas}};
}

void to_json(nlohmann::json& json, const GpuInfo& gpu) {
  json = {{"index", gpu.index},
          {"name", gpu.name},
          {"compute_capability", fmt::format("{}.{}", gpu.compute_major, gpu.compute_minor)},
          {"multiprocessors", gpu.multiprocessors},
          {"memory_bytes", gpu.memory_bytes},
          {"shared_memory_bytes", gpu.shared_memory_bytes},
          {"backend", gpu.backend},
          {"why", gpu.why}};
}

void to_json(nlohmann::json& json, const BackendInfo& backend) {
  json = {{"name", to_string(backend.kind)},
          {"available", backend.available},
          {"reason", backend.reason}};
}

void to_json(nlohmann::json& json, const KernelInfo& kernel) {
  json = {{"backend", to_string(kernel.backend)},
          {"name", kernel.name},
          {"op", to_string(kernel.op)},
          {"tile", kernel.tile},
          {"stages", kernel.stages}};
}

void to_json(nlohmann::json& json, const CostEstimate& cost) {
  json = {{"flops", cost.flops},
          {"bytes", cost.bytes},
          {"tiles", cost.tiles},
          {"waves", cost.waves},
          {"compute_us", cost.compute_us},
          {"memory_us", cost.memory_us},
          {"tile_load_us", cost.tile_load_us},
          {"total_us", cost.total_us}};
}

void to_json(nlohmann::json& json, const PlanCandidate& candidate) {
  json = {{"kernel", candidate.kernel.name},
          {"chosen", candidate.chosen},
          {"refused", candidate.refused},
          {"cost", candidate.cost},
          {"why", candidate.remark}};
}

void to_json(nlohmann::json& json, const TuneCandidate& candidate) {
  json = {{"kernel", candidate.kernel},
          {"predicted_us", candidate.predicted_us},
          {"median_us", candidate.median_us},
          {"launches", candidate.launches},
          {"outcome", candidate.outcome}};
}

namespace cli {

void to_json(nlohmann::json& json, const LayerSpec& spec) {
  json = {{"name", spec.name},
          {"experts", spec.experts},
          {"topk", spec.topk},
          {"hidden", spec.hidden},
          {"intermediate", spec.intermediate},
          {"tokens", spec.tokens},
          {"rows", spec.rows()},
          {"dtype", to_string(spec.dtype)},
          {"weights", to_string(spec.weights)},
          {"routing", to_string(spec.pattern)},
          {"seed", spec.seed},
          {"device", to_string(spec.device)},
          {"repeat", spec.repeat}};
}

void to_json(nlohmann::json& json, const OpReport& report) {
  const nlohmann::json none;
  json = {{"op", report.op},
          {"plan", report.plan ? nlohmann::json(*report.plan) : none},
          {"median_ms", report.median_ms},
          {"best_ms", report.best_ms},
          {"gflops", report.flops > 0 ? nlohmann::json(report.gflops()) : none},
          {"error", report.check.error},
          {"tolerance", report.check.tolerance},
          {"checked_elements", report.check.elements},
          {"passed", report.check.passed()},
          {"fault", report.check.fault}};
}

void to_json(nlohmann::json& json, const TunedProduct& product) {
  const TuneReport& report = product.report;
  json = {{"op", product.op},
          {"problem", report.problem},
          {"plan", report.plan},
          {"candidates", report.candidates},
          {"seconds", report.seconds},
          {"status", status_of(report)},
          {"not_saved", report.not_saved},
          {"operand_sets", report.operand_sets},
          {"flushed", report.flushed},
          {"memory_bytes", report.memory_bytes},
          {"measured", report.measured},
          {"interrupted", report.interrupted}};
}

std::string to_text(const nlohmann::json& document) {
  return document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

void print_json(const nlohmann::json& document) { fmt::print("{}\n", to_text(document)); }

}  // namespace cli
}  // namespace moegemm
