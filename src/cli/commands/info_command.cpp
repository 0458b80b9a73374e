#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>

#include "commands/commands.h"
#include "moegemm/info.h"
#include "output/json.h"
#include "output/report.h"

namespace moegemm::cli {
namespace {

struct InfoOptions {
  bool kernels = false;
  bool json = false;
};

void print_machine_readable(const InfoOptions& options) {
  std::string why_no_gpu;
  const std::vector<GpuInfo> found = gpus(&why_no_gpu);
  nlohmann::json document = {{"version", version()},     {"build", build_description()},
                             {"cpu", cpu_info()},        {"gpus", found},
                             {"why_no_gpu", why_no_gpu}, {"backends", backends()}};
  if (options.kernels) document["kernels"] = kernels();
  print_json(document);
}

void print_kernels() {
  std::vector<std::vector<std::string>> rows;
  for (const KernelInfo& kernel : kernels()) {
    rows.push_back({to_string(kernel.backend), to_string(kernel.op), kernel.name,
                    tile_text(kernel.tile),
                    kernel.stages > 0 ? std::to_string(kernel.stages) : ""});
  }
  fmt::print("\n{}", format_table({"backend", "op", "kernel", "tile", "stages"}, rows,
                                  {false, false, false, false, true}));
}

void print_text(const InfoOptions& options) {
  const CpuInfo cpu = cpu_info();
  fmt::print("moegemm {}\nbuild    {}\n", version(), build_description());
  fmt::print("cpu      {}, {} threads\n", cpu.model, cpu.threads);
  fmt::print("isa      {} (this machine runs: {})\n", cpu.isa, fmt::join(cpu.isas, ", "));
  std::string why_no_gpu;
  const std::vector<GpuInfo> found = gpus(&why_no_gpu);
  if (found.empty()) fmt::print("gpu      none: {}\n", why_no_gpu);
  for (const GpuInfo& gpu : found) {
    fmt::print(
        "gpu {}    {}, compute capability {}.{}, {} multiprocessors, {:.1f} GiB; backend: {}\n",
        gpu.index, gpu.name, gpu.compute_major, gpu.compute_minor, gpu.multiprocessors,
        static_cast<double>(gpu.memory_bytes) / (1 << 30),
        gpu.why.empty() ? gpu.backend : fmt::format("{} ({})", gpu.backend, gpu.why));
  }
  for (const BackendInfo& backend : backends()) {
    fmt::print("backend  {}: {}\n", to_string(backend.kind),
               backend.available ? "available" : "not available: " + backend.reason);
  }
  if (options.kernels) print_kernels();
}

}  // namespace

Command add_info_command(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("info", "Show version, build, CPU, GPUs, backends and kernels.");
  auto options = std::make_shared<InfoOptions>();
  command->add_flag("--kernels", options->kernels, "List every compiled kernel");
  command->add_flag("--json", options->json, "Print as JSON");
  return [options] {
    if (options->json) {
      print_machine_readable(*options);
    } else {
      print_text(*options);
    }
    return int{kSuccess};
  };
}

}  // namespace moegemm::cli
