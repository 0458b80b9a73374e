#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>

#include "commands/commands.h"
#include "layer_options.h"
#include "output/json.h"
#include "output/progress.h"
#include "output/report.h"

namespace moegemm::cli {
namespace {

struct RunOptions {
  explicit RunOptions(CLI::App& command) : layer(command, true) {}

  LayerOptions layer;
  std::uint64_t seed = 0;
  int repeat = 5;
  std::optional<double> tolerance;
};

std::string refuse_tolerance(const std::string& text) {
  double value = -1;
  if (CLI::detail::lexical_cast(text, value) && value >= 0) return {};
  return fmt::format("got {}; accepted: a number from 0 up", text);
}

std::string headline(const LayerSpec& spec, const std::string& device_words) {
  return fmt::format(
      "{}: {} experts, top {}, hidden {}, intermediate {}; {} tokens ({} rows), {}{}, {} routing, "
      "seed {}\non {}: {}\n",
      spec.name, spec.experts, spec.topk, spec.hidden, spec.intermediate, spec.tokens, spec.rows(),
      to_string(spec.dtype),
      spec.weights == WeightFormat::kPlain
          ? ""
          : fmt::format(" with {} weights", to_string(spec.weights)),
      to_string(spec.pattern), spec.seed, to_string(spec.device), device_words);
}

std::string results_table(const std::vector<OpReport>& reports) {
  std::vector<std::vector<std::string>> rows;
  for (const OpReport& report : reports) {
    rows.push_back({report.op, report.plan ? plan_summary(*report.plan) : "",
                    fmt::format("{:.3f}", report.median_ms),
                    report.flops > 0 ? fmt::format("{:.1f}", report.gflops()) : "",
                    fmt::format("{:.1e}", report.check.error),
                    report.check.passed() ? "ok" : "WRONG"});
  }
  return format_table({"op", "plan", "ms", "GFLOP/s", "error", "check"}, rows,
                      {false, false, true, true, true, false});
}

void print_text(const LayerSpec& spec, const std::string& device_words,
                const std::vector<OpReport>& reports) {
  fmt::print("{}\n{}\n", headline(spec, device_words), results_table(reports));
  std::int64_t elements = 0;
  for (const OpReport& report : reports) elements += report.check.elements;
  for (const OpReport& report : reports) {
    if (!report.check.passed()) fmt::print("WRONG {}: {}\n", report.op, report.check.fault);
  }
  const auto failures = std::count_if(reports.begin(), reports.end(),
                                      [](const OpReport& r) { return !r.check.passed(); });
  fmt::print(
      "time: median of {}; error: ||out - expected|| / ||expected|| in float64 over {} "
      "sampled elements; {}\n",
      spec.repeat, elements,
      failures == 0 ? std::string("all checks passed")
                    : fmt::format("{} of {} checks failed", failures, reports.size()));
}

int run(const RunOptions& options) {
  LayerSpec spec = options.layer.layer();
  spec.seed = options.seed;
  spec.repeat = options.repeat;
  spec.tolerance = options.tolerance;
  const OpenDevice device = open_device(spec, layer_bytes(spec));
  std::vector<OpReport> reports;
  {
    Progress progress(layer_ops(spec));
    reports = run_layer(spec, *device.memory, progress);
  }
  const bool passed = std::all_of(reports.begin(), reports.end(),
                                  [](const OpReport& r) { return r.check.passed(); });
  if (options.layer.json()) {
    print_json({{"version", version()},
                {"layer", spec},
                {"device", device.words},
                {"ops", reports},
                {"passed", passed}});
  } else {
    print_text(spec, device.words, reports);
  }
  return passed ? kSuccess : kCheckFailed;
}

}  // namespace

Command add_run_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "run",
      "Run and check one MoE layer: routing, both products forward, combine, dX and dW of both.\n"
      "Quantised weights are frozen: they have no dW. Flags override the preset's numbers.");
  auto options = std::make_shared<RunOptions>(*command);
  command->add_option("--seed", options->seed, "Seed of tokens, weights and routing")
      ->transform(whole_number(0, std::numeric_limits<std::int64_t>::max()))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--repeat", options->repeat, "Timed runs of each operation")
      ->transform(whole_number(1, 1'000'000))
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option("--tolerance", options->tolerance,
                   "Largest relative error that passes; default: what one rounding of the dtype "
                   "and fp32 accumulation explain")
      ->check(CLI::Validator(refuse_tolerance, ""))
      ->type_name("X");
  return [options] { return run(*options); };
}

}  // namespace moegemm::cli
