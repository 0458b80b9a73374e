#include "runtime/torch_tuning.h"

#include <atomic>
#include <exception>
#include <nlohmann/json.hpp>
#include <vector>

namespace moegemm::torch_ops {
namespace {

std::atomic<ProgressFunction> progress_function = nullptr;

}  // namespace

void* TorchTuning::allocate(std::int64_t bytes, Device device) {
  try {
    borrowed_.push_back(allocate_bytes(bytes, device));
  } catch (const std::exception&) {
    // Out of memory, in whatever words torch has for it: the call itself may still have enough.
    return nullptr;
  }
  return borrowed_.back().mutable_data_ptr();
}

bool TorchTuning::progress(const TuneProgress& now) {
  const ProgressFunction function = progress_function;
  return function == nullptr ||
         function(to_string(now.problem).c_str(), now.kernel.c_str(), now.candidate, now.candidates,
                  now.best.c_str(), now.best_us, now.done, now.seconds_left) != 0;
}

ExecutionContext TorchTuning::context(const Execution& execution) {
  ExecutionContext context = execution.context();
  context.tuning = this;
  return context;
}

void set_tune_progress(std::int64_t address) {
  // Operators have no pointer arguments.  NOLINTNEXTLINE(performance-no-int-to-ptr)
  progress_function = reinterpret_cast<ProgressFunction>(address);
}

std::string as_json(const TuneReport& report) {
  nlohmann::json candidates = nlohmann::json::array();
  for (const TuneCandidate& candidate : report.candidates) {
    candidates.push_back({{"kernel", candidate.kernel},
                          {"predicted_us", candidate.predicted_us},
                          {"us", candidate.median_us},
                          {"launches", candidate.launches},
                          {"outcome", candidate.outcome}});
  }
  nlohmann::json steps = nlohmann::json::array();
  for (const Step& step : report.plan.steps) steps.push_back(to_string(step));
  return nlohmann::json{{"problem", to_string(report.problem)},
                        {"kernel", report.plan.product().kernel_name},
                        {"steps", steps},
                        {"workspace_bytes", report.plan.workspace_bytes},
                        {"source", to_string(report.plan.source)},
                        {"seconds", report.seconds},
                        {"operand_sets", report.operand_sets},
                        {"flushed", report.flushed},
                        {"memory_bytes", report.memory_bytes},
                        {"measured", report.measured},
                        {"interrupted", report.interrupted},
                        {"why_not", report.why_not},
                        {"not_saved", report.not_saved},
                        {"candidates", candidates}}
      .dump();
}

std::string tuning_cache() {
  nlohmann::json cache = nlohmann::json::parse(export_tuning_cache());
  // A path is bytes, which JSON cannot hold: as the numbers that they are.
  const std::string path = tuning_cache_path();
  return nlohmann::json{{"path", std::vector<unsigned char>(path.begin(), path.end())},
                        {"entries", cache.at("entries")}}
      .dump();
}

}  // namespace moegemm::torch_ops
