#include "commands/plan_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "output/report.h"

namespace moegemm::cli {
namespace {

// Those of python/moegemm/bench/pages/plots.py: one style for all pictures.
constexpr std::array<std::string_view, 6> kProductColors = {"#1f6feb", "#d29922", "#2da44e",
                                                            "#cf222e", "#8250df", "#0a7ea4"};
constexpr std::string_view kComputeColor = "#1f6feb";
constexpr std::string_view kMemoryColor = "#e3b341";
constexpr std::string_view kTileColor = "#b9c0c9";
constexpr std::string_view kRoofColor = "#57606a";
constexpr std::string_view kTextColor = "#24292f";
constexpr std::string_view kGridColor = "#d0d7de";

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

/// Elements of the picture, one a line.
class Svg {
 public:
  void line(double x1, double y1, double x2, double y2, std::string_view color, double width) {
    body_ += fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" "
        "stroke-width=\"{}\"/>\n",
        x1, y1, x2, y2, color, width);
  }
  void bar(double x, double y, double width, double height, std::string_view color) {
    body_ += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\"/>\n", x, y,
        width, height, color);
  }
  void dot(double x, double y, double radius, std::string_view color, std::string_view told) {
    body_ += fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\" fill=\"{}\" stroke=\"white\" "
        "stroke-width=\"0.8\"><title>{}</title></circle>\n",
        x, y, radius, color, escaped(told));
  }
  /// `anchor`: start, middle or end.
  void text(double x, double y, std::string_view words, std::string_view anchor = "start",
            std::string_view color = kTextColor, int size = 11, std::string_view more = "") {
    body_ += fmt::format(
        "<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"{}\" fill=\"{}\" text-anchor=\"{}\"{}>{}"
        "</text>\n",
        x, y, size, color, anchor, more, escaped(words));
  }
  std::string document(int width, int height) const {
    return fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" "
        "viewBox=\"0 0 {0} {1}\" font-family=\"DejaVu Sans, Verdana, sans-serif\">\n"
        "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n{2}</svg>\n",
        width, height, body_);
  }

 private:
  std::string body_;
};

/// A logarithmic axis from `from` to `to` in the picture. It ends at round numbers: 1, 2 and 5
/// times powers of ten.
struct LogAxis {
  double from = 0;
  double to = 0;
  double low = 1;
  double high = 10;

  void cover(double least, double most) {
    low = round_below(least);
    high = low;
    while (high < most) high = round_above(high);
  }
  double place(double value) const {
    return from + std::log(value / low) / std::log(high / low) * (to - from);
  }
  /// The round numbers on it, or of many only the powers of ten.
  std::vector<double> ticks() const {
    const bool many = high / low > 500;
    std::vector<double> found;
    double tick = low;
    while (tick < high * 1.001) {
      if (!many || tick < 1.5 * power_below(tick)) found.push_back(tick);
      tick = round_above(tick);
    }
    return found;
  }

 private:
  static double power_below(double value) {
    return std::pow(10.0, std::floor(std::log10(value * 1.001)));
  }
  static double round_below(double value) {
    const double power = power_below(value);
    return (value >= 5 * power ? 5 : value >= 2 * power ? 2 : 1) * power;
  }
  static double round_above(double value) {
    const double power = power_below(value);
    return (value < 1.5 * power ? 2 : value < 4 * power ? 5 : 10) * power;
  }
};

bool is_predicted(const PlannedProduct& product) {
  const CostEstimate& cost = product.explained.cost;
  return cost.total_us > 0 && cost.flops > 0 && cost.bytes > 0;
}

double flops_per_second(const CostEstimate& cost) { return cost.flops / cost.total_us * 1e6; }

struct RooflinePanel {
  LogAxis x{60, 430};
  LogAxis y{350, 60};
  double unit = 1e12;  ///< of the vertical axis, in FLOP/s
};

RooflinePanel panel_for(const std::vector<PlannedProduct>& products) {
  RooflinePanel panel;
  double least_x = 1e300;
  double most_x = 0;
  double least_y = 1e300;
  double most_y = 0;
  for (const PlannedProduct& product : products) {
    if (!is_predicted(product)) continue;
    const auto& [plan, limits, cost, candidates, missing] = product.explained;
    const double intensity = cost.flops / cost.bytes;
    const double ridge = limits.flops_per_second / limits.bytes_per_second;
    least_x = std::min({least_x, intensity / 1.2, ridge / 4});  // room for the roof's words
    most_x = std::max({most_x, intensity * 1.2, ridge * 2});
    least_y = std::min({least_y, flops_per_second(cost) / 1.2, limits.flops_per_second / 4});
    most_y = std::max(most_y, limits.flops_per_second);
  }
  panel.unit = most_y >= 1e12 ? 1e12 : 1e9;
  panel.x.cover(least_x, most_x);
  panel.y.cover(least_y / panel.unit, most_y * 1.2 / panel.unit);
  return panel;
}

void draw_axes(Svg& svg, const RooflinePanel& panel) {
  for (const double tick : panel.x.ticks()) {
    const double x = panel.x.place(tick);
    svg.line(x, panel.y.from, x, panel.y.to, kGridColor, 0.5);
    svg.text(x, panel.y.from + 16, fmt::format("{:g}", tick), "middle");
  }
  for (const double tick : panel.y.ticks()) {
    const double y = panel.y.place(tick);
    svg.line(panel.x.from, y, panel.x.to, y, kGridColor, 0.5);
    svg.text(panel.x.from - 6, y + 4, fmt::format("{:g}", tick), "end");
  }
  svg.line(panel.x.from, panel.y.from, panel.x.to, panel.y.from, kTextColor, 1);
  svg.line(panel.x.from, panel.y.from, panel.x.from, panel.y.to, kTextColor, 1);
  svg.text((panel.x.from + panel.x.to) / 2, panel.y.from + 34, "FLOP per byte of memory traffic",
           "middle");
  svg.text(panel.x.from - 46, panel.y.to - 12, panel.unit == 1e12 ? "TFLOP/s" : "GFLOP/s");
}

/// One line up the memory's slope and along the peak; what both ends say.
void draw_roof(Svg& svg, const RooflinePanel& panel, const MachineLimits& limits) {
  const double peak = limits.flops_per_second / panel.unit;
  const double slope = limits.bytes_per_second / panel.unit;
  const double ridge = peak / slope;
  const double left = std::max(panel.x.low, panel.y.low / slope);
  svg.line(panel.x.place(left), panel.y.place(left * slope), panel.x.place(ridge),
           panel.y.place(peak), kRoofColor, 1.3);
  svg.line(panel.x.place(ridge), panel.y.place(peak), panel.x.to, panel.y.place(peak), kRoofColor,
           1.3);
  svg.text(panel.x.to, panel.y.place(peak) - 5,
           fmt::format("{:.3g} {}", peak, panel.unit == 1e12 ? "TFLOP/s" : "GFLOP/s"), "end",
           kRoofColor, 10);
  const double bytes = limits.bytes_per_second;
  // Above the slope, where no product can be.
  svg.text(panel.x.place(ridge) - 20, panel.y.place(peak) + 10,
           bytes >= 1e12 ? fmt::format("{:.3g} TB/s", bytes / 1e12)
                         : fmt::format("{:.3g} GB/s", bytes / 1e9),
           "end", kRoofColor, 10);
}

void draw_roofline(Svg& svg, const std::vector<PlannedProduct>& products) {
  const RooflinePanel panel = panel_for(products);
  draw_axes(svg, panel);
  std::vector<std::pair<double, double>> drawn;  // products on one device share a roof
  for (const PlannedProduct& product : products) {
    const MachineLimits& limits = product.explained.limits;
    const std::pair roof{limits.flops_per_second, limits.bytes_per_second};
    if (!is_predicted(product) || std::find(drawn.begin(), drawn.end(), roof) != drawn.end()) {
      continue;
    }
    draw_roof(svg, panel, limits);
    drawn.push_back(roof);
  }
  for (std::size_t i = 0; i < products.size(); ++i) {
    if (!is_predicted(products[i])) continue;
    const CostEstimate& cost = products[i].explained.cost;
    // Smaller and smaller: of products at one place rings are seen.
    svg.dot(panel.x.place(cost.flops / cost.bytes),
            panel.y.place(flops_per_second(cost) / panel.unit), 8.0 - static_cast<double>(i),
            kProductColors.at(i % kProductColors.size()),
            fmt::format("{}: {:.3g} {}FLOP/s predicted", products[i].name,
                        flops_per_second(cost) / panel.unit, panel.unit == 1e12 ? "T" : "G"));
  }
}

/// Name and kernel of each product, and a bar for each thing that takes time.
void draw_times(Svg& svg, const std::vector<PlannedProduct>& products) {
  constexpr double kLeft = 490;
  constexpr double kWidth = 320;
  constexpr double kRow = 52;
  double longest = 0;
  bool loads_tiles = false;
  for (const PlannedProduct& product : products) {
    const CostEstimate& cost = product.explained.cost;
    longest = std::max({longest, cost.compute_us, cost.memory_us, cost.tile_load_us});
    loads_tiles = loads_tiles || cost.tile_load_us > 0;
  }
  for (std::size_t i = 0; i < products.size(); ++i) {
    const CostEstimate& cost = products[i].explained.cost;
    const double top = 58 + kRow * static_cast<double>(i);
    svg.dot(kLeft - 12, top - 4, 4, kProductColors.at(i % kProductColors.size()), products[i].name);
    svg.text(kLeft, top, products[i].name, "start", kTextColor, 11, " font-weight=\"bold\"");
    svg.text(kLeft + 72, top, products[i].explained.plan.product().kernel_name, "start", kRoofColor,
             10);
    if (!is_predicted(products[i])) {
      svg.text(kLeft, top + 16, "this backend predicts no times", "start", kRoofColor, 10);
      continue;
    }
    double y = top + 6;
    for (const auto& [time, color] : {std::pair{cost.compute_us, kComputeColor},
                                      {cost.memory_us, kMemoryColor},
                                      {cost.tile_load_us, kTileColor}}) {
      if (time <= 0) continue;
      const double width = std::max(1.0, kWidth * time / longest);
      svg.bar(kLeft, y, width, 8, color);
      svg.text(kLeft + width + 5, y + 7.5, duration_text(time), "start", kTextColor, 9);
      y += 10;
    }
  }
  if (longest == 0) return;
  double x = kLeft;
  for (const auto& [words, color] : {std::pair{"compute", kComputeColor},
                                     {"memory", kMemoryColor},
                                     {"tile loads", kTileColor}}) {
    if (color == kTileColor && !loads_tiles) continue;
    svg.bar(x, 382, 9, 9, color);
    svg.text(x + 14, 391, words);
    x += 90;
  }
}

}  // namespace

std::string plan_svg(const std::string& title, const std::vector<PlannedProduct>& products) {
  Svg svg;
  svg.text(9, 20, title, "start", kTextColor, 12, " font-weight=\"bold\"");
  if (std::any_of(products.begin(), products.end(), is_predicted)) draw_roofline(svg, products);
  draw_times(svg, products);
  svg.text(9, 412, "Predicted by the planner's cost model, not measured.", "start", kRoofColor, 10);
  return svg.document(900, 420);
}

}  // namespace moegemm::cli
