#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands/commands.h"
#include "layer/layer_tune.h"
#include "layer_options.h"
#include "moegemm/error.h"
#include "report.h"
#include "testing/device/memory.h"

namespace moegemm::cli {
namespace {

struct TuneCommandOptions {
  std::unique_ptr<LayerOptions> layer;
  std::string routing = "uniform";
  double budget = 2;
  bool again = false;
  bool json = false;
};

std::atomic<bool> interrupted = false;

/// Ctrl-C ends the measurement, not the program: what was found is kept and shown.
class InterruptHandler {
 public:
  InterruptHandler() {
    interrupted = false;
    struct sigaction action = {};
    action.sa_handler = [](int) { interrupted = true; };
    action.sa_flags = SA_RESETHAND;  // a second one ends the program
    sigaction(SIGINT, &action, &previous_);
  }
  ~InterruptHandler() { sigaction(SIGINT, &previous_, nullptr); }
  InterruptHandler(const InterruptHandler&) = delete;
  InterruptHandler& operator=(const InterruptHandler&) = delete;

 private:
  struct sigaction previous_ = {};
};

/// One line on stderr, redrawn at most every 50 ms; nothing where there is no terminal.
class TuneBar {
 public:
  ~TuneBar() {
    if (drawn_) std::fputs("\r\x1b[2K", stderr);  // not with fmt, which may throw
  }

  void draw(const std::string& op, const TuneProgress& now) {
    const auto time = std::chrono::steady_clock::now();
    if (!visible_ || (drawn_ && time - last_ < std::chrono::milliseconds(50))) return;
    last_ = time;
    drawn_ = true;
    constexpr int kCells = 20;
    const auto filled = static_cast<std::size_t>(kCells * now.done);
    const std::string bar = std::string(filled, '#') + std::string(kCells - filled, '.');
    const std::string best =
        now.best.empty() ? std::string("-") : fmt::format("{} {:.1f} us", now.best, now.best_us);
    const std::string line =
        fmt::format("[{}] {} {}x{}x{}: {}/{} {}; best {}; {:.1f} s left", bar, op, now.problem.rows,
                    now.problem.n, now.problem.k, now.candidate, now.candidates, now.kernel, best,
                    now.seconds_left);
    fmt::print(stderr, "\r\x1b[2K{}", line.substr(0, 150));
    std::fflush(stderr);
  }

 private:
  bool visible_ = isatty(STDERR_FILENO) != 0;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_;
};

const TuneCandidate* find(const TuneReport& report, const std::string& kernel) {
  for (const TuneCandidate& candidate : report.candidates) {
    if (candidate.kernel == kernel) return &candidate;
  }
  return nullptr;
}

std::string status_of(const TuneReport& report) {
  if (report.measured) return report.interrupted ? "measured in part" : "measured";
  if (report.interrupted) return "interrupted";
  return report.why_not.empty() ? "known already" : report.why_not;
}

std::vector<std::string> table_row(const TunedProduct& product) {
  const TuneReport& report = product.report;
  const Problem& problem = report.problem;
  std::string time;
  std::string gain;
  const TuneCandidate* winner = find(report, report.plan.product().kernel_name);
  if (report.measured && winner != nullptr) {
    time = fmt::format("{:.1f}", winner->median_us);
    // The heuristic's kernel comes first.
    gain = fmt::format("{:+.1f}%",
                       (report.candidates.front().median_us / winner->median_us - 1) * 100);
  }
  return {product.op,
          fmt::format("{} x {} x {}", problem.rows, problem.n, problem.k),
          plan_summary(report.plan),
          time,
          gain,
          fmt::format("{:.2f}", report.seconds),
          status_of(report)};
}

nlohmann::json product_json(const TunedProduct& product) {
  const TuneReport& report = product.report;
  nlohmann::json candidates = nlohmann::json::array();
  for (const TuneCandidate& candidate : report.candidates) {
    candidates.push_back({{"kernel", candidate.kernel},
                          {"predicted_us", candidate.predicted_us},
                          {"median_us", candidate.median_us},
                          {"launches", candidate.launches},
                          {"outcome", candidate.outcome}});
  }
  return {{"op", product.op},
          {"problem", to_json(report.problem)},
          {"plan", to_json(report.plan)},
          {"candidates", candidates},
          {"seconds", report.seconds},
          {"status", status_of(report)},
          {"not_saved", report.not_saved},
          {"operand_sets", report.operand_sets},
          {"flushed", report.flushed},
          {"memory_bytes", report.memory_bytes},
          {"measured", report.measured},
          {"interrupted", report.interrupted}};
}

/// Why what was measured is lost when the program ends; empty if it is not.
std::string why_not_saved(const std::vector<TunedProduct>& products) {
  // Each product saves what those before it could not.
  for (auto product = products.rbegin(); product != products.rend(); ++product) {
    if (product->report.measured) return product->report.not_saved;
  }
  return {};
}

void print_json(const LayerSpec& spec, const std::string& device_words,
                const std::vector<TunedProduct>& products) {
  nlohmann::json list = nlohmann::json::array();
  for (const TunedProduct& product : products) list.push_back(product_json(product));
  fmt::print("{}\n", to_text({{"layer", to_json(spec)},
                              {"device", device_words},
                              {"cache", tuning_cache_path()},
                              {"products", list},
                              {"interrupted", bool{interrupted}}}));
}

void print_text(const LayerSpec& spec, const std::string& device_words,
                const std::vector<TunedProduct>& products) {
  std::vector<std::vector<std::string>> rows;
  for (const TunedProduct& product : products) rows.push_back(table_row(product));
  const std::string table =
      format_table({"op", "M x N x K", "fastest", "us", "gain", "s", "status"}, rows,
                   {false, false, false, true, true, true, false});
  const bool saved = why_not_saved(products).empty();
  fmt::print("{} with {} tokens on {}: {}\n\n{}\n{}\n", spec.name, spec.tokens,
             to_string(spec.device), device_words, table,
             saved ? fmt::format("kept in {}", tuning_cache_path()) : "not kept");
  if (interrupted && saved) fmt::print("interrupted: what was found until then is kept\n");
}

int tune(const TuneCommandOptions& options) {
  LayerSpec spec = options.layer->layer();
  spec.pattern = *parse_routing_pattern(options.routing);
  const std::string device_words = describe_device(spec.device);
  const std::unique_ptr<testing::Memory> memory = testing::open_memory(spec.device);
  require_memory(spec, tuning_bytes(spec), *memory);
  std::vector<TunedProduct> products;
  {
    const InterruptHandler handler;
    TuneBar bar;
    LayerTuning tuning;
    tuning.budget_seconds = options.budget;
    tuning.again = options.again;
    tuning.progress = [&](const std::string& op, const TuneProgress& now) {
      bar.draw(op, now);
      return !interrupted;
    };
    products = tune_layer(spec, *memory, tuning);
  }
  if (options.json) {
    print_json(spec, device_words, products);
  } else {
    print_text(spec, device_words, products);
  }
  if (const std::string reason = why_not_saved(products); !reason.empty()) {
    throw Error(ErrorKind::kRuntime, fmt::format("the measurements are not saved: {}", reason));
  }
  return interrupted ? kInterrupted : kSuccess;
}

}  // namespace

Command add_tune_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "tune",
      "Measure the kernels for each product of a layer and remember the fastest, for calls with\n"
      "autotune=True. Ctrl-C keeps what was found.");
  auto options = std::make_shared<TuneCommandOptions>();
  options->layer = std::make_unique<LayerOptions>(*command);
  command->add_option("--routing", options->routing, "How tokens choose experts")
      ->check(CLI::IsMember({"uniform", "zipf", "balanced"}))
      ->type_name("")
      ->capture_default_str();
  command->add_option("--budget", options->budget, "Seconds per product")
      ->check(CLI::Range(0.01, 3600.0))
      ->type_name("S")
      ->capture_default_str();
  command->add_flag("--again", options->again, "Measure also what is known already");
  command->add_flag("--json", options->json, "Print the results as JSON");
  return [options] { return tune(*options); };
}

}  // namespace moegemm::cli
