#include "output/report.h"

#include <fmt/format.h>

#include <algorithm>

namespace moegemm::cli {

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

std::string tile_text(const TileShape& tile) {
  return tile.rows > 0 ? fmt::format("{}x{}x{}", tile.rows, tile.columns, tile.depth) : "";
}

std::string plan_summary(const Plan& plan) {
  std::string text;
  for (const Step& step : plan.steps) {
    if (step.first_feature > 0) continue;  // as the first cut
    if (!text.empty()) text += " + ";
    if (step.kind != StepKind::kProduct) {
      text += to_string(step.kind);
      continue;
    }
    text += fmt::format("{} {}", to_string(step.backend), step.kernel_name);
    if (const std::string tile = tile_text(step.tile); !tile.empty()) text += " " + tile;
    if (step.features > 0) text += fmt::format(", {} features at a time", step.features);
  }
  return text;
}

std::string duration_text(double us) {
  return us < 1000 ? fmt::format("{:.1f} us", us) : fmt::format("{:.2f} ms", us / 1000);
}

std::string status_of(const TuneReport& report) {
  if (report.measured) return report.interrupted ? "measured in part" : "measured";
  if (report.interrupted) return "interrupted";
  return report.why_not.empty() ? "known already" : report.why_not;
}

}  // namespace moegemm::cli
