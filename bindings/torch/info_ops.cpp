#include <nlohmann/json.hpp>

#include "moegemm/error.h"
#include "moegemm/execution.h"
#include "moegemm/info.h"
#include "operators.h"

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

}  // namespace

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

std::int64_t load_kernels(std::int64_t device) {
  return raising([&]() -> std::int64_t {
    return moegemm::load_kernels({DeviceType::kCuda, static_cast<int>(device)});
  });
}

bool loads_early() {
  return raising([] {
    check_environment();
    return moegemm::loads_early();
  });
}

}  // namespace moegemm::torch_ops
