#include <nlohmann/json.hpp>

#include "moegemm/error.h"
#include "moegemm/execution.h"
#include "moegemm/info.h"
#include "registration.h"
#include "runtime/execution.h"
#include "runtime/torch_tuning.h"

namespace moegemm::torch_ops {
namespace {

using nlohmann::json;

json describe(const KernelInfo& kernel) {
  return {{"backend", to_string(kernel.backend)},
          {"name", kernel.name},
          {"op", to_string(kernel.op)},
          {"tile", {kernel.tile.rows, kernel.tile.columns, kernel.tile.depth}},
          {"stages", kernel.stages}};
}

json describe(const GpuInfo& gpu) {
  return {{"index", gpu.index},
          {"name", gpu.name},
          {"compute_capability", {gpu.compute_major, gpu.compute_minor}},
          {"multiprocessors", gpu.multiprocessors},
          {"memory_bytes", gpu.memory_bytes},
          {"shared_memory_bytes", gpu.shared_memory_bytes},
          {"backend", gpu.backend},
          {"why", gpu.why}};
}

/// What moegemm.info() shows, as JSON.
std::string info() {
  return raising([] {
    const CpuInfo cpu = cpu_info();
    std::string why_no_gpu;
    json gpu_list = json::array();
    for (const GpuInfo& gpu : gpus(&why_no_gpu)) gpu_list.push_back(describe(gpu));
    json backend_list = json::array();
    for (const BackendInfo& backend : backends()) {
      backend_list.push_back({{"name", to_string(backend.kind)},
                              {"available", backend.available},
                              {"reason", backend.reason}});
    }
    json kernel_list = json::array();
    for (const KernelInfo& kernel : kernels()) kernel_list.push_back(describe(kernel));
    return json{{"version", version()},
                {"build", build_description()},
                {"cpu", {{"model", cpu.model}, {"isa", cpu.isa}, {"isas", cpu.isas}}},
                {"gpus", gpu_list},
                {"why_no_gpu", why_no_gpu},
                {"backends", backend_list},
                {"kernels", kernel_list}}
        .dump();
  });
}

/// See moegemm::load_kernels, for a CUDA device.
std::int64_t load_kernels(std::int64_t device) {
  return raising([&]() -> std::int64_t {
    return moegemm::load_kernels({DeviceType::kCuda, static_cast<int>(device)});
  });
}

/// See moegemm::loads_early; checks the environment's names too.
bool loads_early() {
  return raising([] {
    check_environment();
    return moegemm::loads_early();
  });
}

/// See set_max_multiprocessors.
std::int64_t raising_set_max_multiprocessors(std::int64_t most) {
  return raising([&] { return set_max_multiprocessors(most); });
}

/// See moegemm::set_batch_invariant.
bool raising_set_batch_invariant(bool on) {
  return raising([&] { return set_batch_invariant(on); });
}

constexpr Operator kOperators[] = {
    {"info() -> str", TORCH_BOX(&info)},
    {"load_kernels(int device) -> int", TORCH_BOX(&load_kernels)},
    {"loads_early() -> bool", TORCH_BOX(&loads_early)},
    {"set_max_multiprocessors(int most) -> int", TORCH_BOX(&raising_set_max_multiprocessors)},
    {"set_batch_invariant(bool on) -> bool", TORCH_BOX(&raising_set_batch_invariant)},
    {"take_notes() -> str", TORCH_BOX(&take_notes)},
    {"tuning_cache() -> str", TORCH_BOX(&tuning_cache)},
    {"set_tune_progress(int address) -> ()", TORCH_BOX(&set_tune_progress)},
};

/// Loading is the first thing that happens: from here on warnings reach Python's.
const bool warns_python = [] {
  set_warning_handler([](const std::string& message) { note_once(message, false); });
  return true;
}();

}  // namespace

MOEGEMM_REGISTER_WITHOUT_TENSORS(kOperators)

}  // namespace moegemm::torch_ops
