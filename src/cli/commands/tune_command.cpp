#include <fmt/format.h>

#include <atomic>
#include <csignal>
#include <memory>

#include "commands/commands.h"
#include "layer_options.h"
#include "moegemm/error.h"
#include "output/json.h"
#include "output/progress.h"
#include "output/report.h"

namespace moegemm::cli {
namespace {

struct TuneCommandOptions {
  explicit TuneCommandOptions(CLI::App& command) : layer(command, true) {}

  LayerOptions layer;
  double budget = 2;
  bool again = false;
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

void draw(ProgressLine& line, const std::string& op, const TuneProgress& now) {
  const std::string best =
      now.best.empty() ? std::string("-") : fmt::format("{} {:.1f} us", now.best, now.best_us);
  line.draw(now.done, fmt::format("{} {}x{}x{}: {}/{} {}; best {}; {:.1f} s left", op,
                                  now.problem.rows, now.problem.n, now.problem.k, now.candidate,
                                  now.candidates, now.kernel, best, now.seconds_left));
}

const TuneCandidate* find(const TuneReport& report, const std::string& kernel) {
  for (const TuneCandidate& candidate : report.candidates) {
    if (candidate.kernel == kernel) return &candidate;
  }
  return nullptr;
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

/// Why what was measured is lost when the program ends; empty if it is not.
std::string why_not_saved(const std::vector<TunedProduct>& products) {
  // Each product saves what those before it could not.
  for (auto product = products.rbegin(); product != products.rend(); ++product) {
    if (product->report.measured) return product->report.not_saved;
  }
  return {};
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
  const LayerSpec spec = options.layer.layer();
  const OpenDevice device = open_device(spec, tuning_bytes(spec));
  std::vector<TunedProduct> products;
  {
    const InterruptHandler handler;
    ProgressLine line;
    LayerTuning tuning;
    tuning.budget_seconds = options.budget;
    tuning.again = options.again;
    tuning.progress = [&](const std::string& op, const TuneProgress& now) {
      draw(line, op, now);
      return !interrupted;
    };
    products = tune_layer(spec, *device.memory, tuning);
  }
  if (options.layer.json()) {
    print_json({{"layer", spec},
                {"device", device.words},
                {"cache", tuning_cache_path()},
                {"products", products},
                {"interrupted", bool{interrupted}}});
  } else {
    print_text(spec, device.words, products);
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
  auto options = std::make_shared<TuneCommandOptions>(*command);
  command->add_option("--budget", options->budget, "Seconds per product")
      ->check(number(0.01, 3600))
      ->type_name("S")
      ->capture_default_str();
  command->add_flag("--again", options->again, "Measure also what is known already");
  return [options] { return tune(*options); };
}

}  // namespace moegemm::cli
