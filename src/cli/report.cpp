#include "report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace moegemm::cli {
namespace {

/// JSON has no NaN: a value that is not finite becomes null.
nlohmann::json number(double value) {
  return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(nullptr);
}

nlohmann::json to_json(const TileShape& tile) {
  return {{"rows", tile.rows}, {"cols", tile.cols}, {"depth", tile.depth}};
}

}  // namespace

std::string format_table(const std::vector<std::string>& header,
                         const std::vector<std::vector<std::string>>& rows,
                         const std::vector<bool>& right_aligned) {
  std::vector<std::size_t> widths;
  for (const std::string& title : header) widths.push_back(title.size());
  for (const auto& row : rows) {
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string text;
    for (std::size_t c = 0; c < cells.size(); ++c) {
      const std::string padding(widths[c] - cells[c].size(), ' ');
      text += (c == 0 ? "" : "  ") + (right_aligned[c] ? padding + cells[c] : cells[c] + padding);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text + "\n";
  };
  std::vector<std::string> rule;
  for (const std::size_t width : widths) rule.emplace_back(width, '-');
  std::string table = line(header) + line(rule);
  for (const auto& row : rows) table += line(row);
  return table;
}

std::string plan_summary(const Plan& plan) {
  std::string text;
  for (const Step& step : plan.steps) {
    if (!text.empty()) text += " + ";
    if (step.kind != StepKind::kProduct) {
      text += to_string(step.kind);
      continue;
    }
    text += fmt::format("{} {}", to_string(step.backend), step.kernel_name);
    if (step.tile.rows > 0) {
      text += fmt::format(" {}x{}x{}", step.tile.rows, step.tile.cols, step.tile.depth);
    }
  }
  return text;
}

std::string to_text(const nlohmann::json& document) {
  return document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

nlohmann::json to_json(const Step& step) {
  nlohmann::json json = {{"kind", to_string(step.kind)},
                         {"reason", step.reason},
                         {"workspace_offset", step.workspace_offset}};
  if (step.kind == StepKind::kProduct) {
    json.update({{"backend", to_string(step.backend)},
                 {"kernel", step.kernel_name},
                 {"tile", to_json(step.tile)},
                 {"stages", step.stages},
                 {"grid", step.grid},
                 {"order", to_string(step.order)},
                 {"weights_pass_through", step.weights == WeightCaching::kPassThrough}});
  }
  return json;
}

nlohmann::json to_json(const Plan& plan) {
  const Step& product = plan.product();
  nlohmann::json steps = nlohmann::json::array();
  for (const Step& step : plan.steps) steps.push_back(to_json(step));
  return {{"backend", to_string(product.backend)},
          {"kernel", product.kernel_name},
          {"tile", to_json(product.tile)},
          {"stages", product.stages},
          {"grid", product.grid},
          {"steps", steps},
          {"workspace_bytes", plan.workspace_bytes},
          {"source", to_string(plan.source)},
          {"note", plan.note},
          {"text", to_string(plan)}};
}

nlohmann::json to_json(const Problem& problem) {
  return {{"op", to_string(problem.op)},
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

nlohmann::json to_json(const LayerSpec& spec) {
  return {{"name", spec.name},
          {"experts", spec.experts},
          {"topk", spec.topk},
          {"hidden", spec.hidden},
          {"intermediate", spec.intermediate},
          {"tokens", spec.tokens},
          {"rows", spec.rows()},
          {"dtype", to_string(spec.dtype)},
          {"routing", to_string(spec.pattern)},
          {"seed", spec.seed},
          {"device", to_string(spec.device)},
          {"repeat", spec.repeat}};
}

nlohmann::json to_json(const OpReport& report) {
  return {{"op", report.op},
          {"plan", report.plan ? to_json(*report.plan) : nlohmann::json(nullptr)},
          {"median_ms", report.median_ms},
          {"best_ms", report.best_ms},
          {"gflops", report.flops > 0 ? number(report.flops / report.median_ms * 1e-6)
                                      : nlohmann::json(nullptr)},
          {"error", number(report.check.error)},
          {"tolerance", report.check.tolerance},
          {"checked_elements", report.check.elements},
          {"passed", report.check.passed()},
          {"fault", report.check.fault}};
}

}  // namespace moegemm::cli
