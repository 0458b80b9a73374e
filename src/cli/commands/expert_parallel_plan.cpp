#include "commands/expert_parallel_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "moegemm/error.h"
#include "output/report.h"

namespace moegemm::cli {
namespace {

// What a Hopper GPU reaches, not what its data sheet says: 16-bit products of whole layers, memory
// passes, all-to-all inside a node (of 450 GB/s) and between nodes (of a 400 Gb/s card).
constexpr double kFlopsPerSecond = 600e12;
constexpr double kMemoryBytesPerSecond = 4.2e12;
constexpr double kNodeLinkGb = 360;
constexpr double kNetworkLinkGb = 45;

/// How many of `groups` equal parts of the experts a token's topk different experts are in, on
/// average.
double parts_per_token(const LayerSpec& spec, std::int64_t groups) {
  const std::int64_t elsewhere = spec.experts - spec.experts / groups;
  double none = 1;  // the chance that no expert of one part is chosen
  for (std::int64_t i = 0; i < spec.topk; ++i) {
    const double left = static_cast<double>(spec.experts - i);
    none *= static_cast<double>(std::max<std::int64_t>(0, elsewhere - i)) / left;
  }
  return static_cast<double>(groups) * (1 - none);
}

ExchangeWay exchange(const LayerSpec& spec, const ExpertParallelOptions& options,
                     const std::string& name, double copies) {
  const double row = static_cast<double>(spec.hidden * size_bytes(spec.dtype));
  // Of even copies those cross the slowest link that leave the node, or on one node the rank.
  const auto parts = static_cast<double>(options.nodes > 1 ? options.nodes : options.ranks);
  const double bytes = static_cast<double>(spec.tokens) * copies * row * (1 - 1 / parts);
  return {name, copies, bytes, bytes / (options.link_gb_per_second * 1e9) * 1e6};
}

void require_valid(const LayerSpec& spec, const ExpertParallelOptions& options) {
  if (spec.experts % options.ranks != 0) {
    throw Error(ErrorKind::kInvalidValue,
                fmt::format("--expert-parallel is {}; it must divide the {} experts of {}",
                            options.ranks, spec.experts, spec.name));
  }
  if (options.ranks % options.nodes != 0) {
    throw Error(ErrorKind::kInvalidValue,
                fmt::format("--nodes is {}; it must divide the {} ranks of --expert-parallel",
                            options.nodes, options.ranks));
  }
}

std::string mega(double bytes) { return fmt::format("{:.0f} MB", bytes / 1e6); }

}  // namespace

double ExpertParallelPlan::local_us() const {
  return 2 * pass_us * (1 + 1 / (ways.front().copies_per_token));
}

std::string ExpertParallelPlan::bound() const {
  const auto fastest =
      std::min_element(ways.begin(), ways.end(),
                       [](const ExchangeWay& a, const ExchangeWay& b) { return a.us < b.us; });
  return 2 * ways.front().us > products_us
             ? (2 * fastest->us > products_us ? "exchange" : "exchange, unless tokens travel once")
             : "products";
}

std::string ExpertParallelPlan::text() const {
  std::string text = fmt::format(
      "{} ranks on {} node{}, {:g} GB/s for each GPU; forward of one layer, even routing\n"
      "  experts   {} on each rank, {} of weights\n"
      "  rows      {} received by a rank, {}; {} kept for the backward\n"
      "  products  {} at {:g} TFLOP/s\n"
      "  local     {} to pack and combine, {} for each pass over the rows\n",
      options.ranks, options.nodes, options.nodes > 1 ? "s" : "", options.link_gb_per_second,
      experts_per_rank, mega(weight_bytes), rows_per_rank, mega(row_bytes), mega(kept_bytes),
      duration_text(products_us), kFlopsPerSecond / 1e12, duration_text(local_us()),
      duration_text(pass_us));
  std::vector<std::vector<std::string>> rows;
  for (const ExchangeWay& way : ways) {
    rows.push_back({"once for each " + way.name, fmt::format("{:.1f}", way.copies_per_token),
                    mega(way.sent_bytes), duration_text(way.us), duration_text(2 * way.us),
                    duration_text(products_us + local_us() + 2 * way.us)});
  }
  text += format_table({"a token travels", "copies", "sent", "one way", "both ways", "layer"}, rows,
                       {false, true, true, true, true, true});
  return text + fmt::format("  bound by  {}\n", bound());
}

nlohmann::json ExpertParallelPlan::json() const {
  nlohmann::json exchanges = nlohmann::json::array();
  for (const ExchangeWay& way : ways) {
    exchanges.push_back({{"once_per", way.name},
                         {"copies_per_token", way.copies_per_token},
                         {"sent_bytes", way.sent_bytes},
                         {"one_way_us", way.us}});
  }
  return {{"ranks", options.ranks},
          {"nodes", options.nodes},
          {"link_gb_per_second", options.link_gb_per_second},
          {"experts_per_rank", experts_per_rank},
          {"rows_per_rank", rows_per_rank},
          {"weight_bytes", weight_bytes},
          {"row_bytes", row_bytes},
          {"kept_bytes", kept_bytes},
          {"products_us", products_us},
          {"pass_us", pass_us},
          {"local_us", local_us()},
          {"exchange", exchanges},
          {"bound", bound()}};
}

ExpertParallelPlan plan_expert_parallel(const LayerSpec& spec, ExpertParallelOptions options) {
  require_valid(spec, options);
  if (options.link_gb_per_second <= 0)
    options.link_gb_per_second = options.nodes > 1 ? kNetworkLinkGb : kNodeLinkGb;
  ExpertParallelPlan plan;
  plan.options = options;
  plan.experts_per_rank = spec.experts / options.ranks;
  plan.rows_per_rank = spec.rows();
  const auto rows = static_cast<double>(spec.rows());
  const auto bytes = static_cast<double>(size_bytes(spec.dtype));
  const double weights =
      3.0 * static_cast<double>(spec.hidden * spec.intermediate);  // of an expert
  plan.weight_bytes = static_cast<double>(plan.experts_per_rank) * weights * bytes;
  plan.row_bytes = rows * static_cast<double>(spec.hidden) * bytes;
  plan.kept_bytes = plan.row_bytes + rows * 2.0 * static_cast<double>(spec.intermediate) * bytes;
  plan.products_us = 2 * rows * weights / kFlopsPerSecond * 1e6;
  plan.pass_us = plan.row_bytes / kMemoryBytesPerSecond * 1e6;
  plan.ways = {exchange(spec, options, "slot", static_cast<double>(spec.topk)),
               exchange(spec, options, "rank", parts_per_token(spec, options.ranks))};
  if (options.nodes > 1)
    plan.ways.push_back(exchange(spec, options, "node", parts_per_token(spec, options.nodes)));
  return plan;
}

}  // namespace moegemm::cli
