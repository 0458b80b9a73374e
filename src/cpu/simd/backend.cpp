#include <vector>

#include "core/registry.h"

namespace moegemm {
namespace {

/// Runs everything with the reference loops.
class CpuBackend final : public Backend {
 public:
  BackendKind kind() const override { return BackendKind::kCpu; }
  std::string unavailable(Device device) const override {
    return reference_backend().unavailable(device);
  }
  std::span<const KernelInfo> kernels() const override {
    static const std::vector<KernelInfo> list = [] {
      const auto reference = reference_backend().kernels();
      std::vector<KernelInfo> own(reference.begin(), reference.end());
      for (KernelInfo& kernel : own) {
        kernel.backend = BackendKind::kCpu;
        kernel.name.replace(0, std::string("reference").size(), "loops");
      }
      return own;
    }();
    return list;
  }
  std::string refuse(const Problem& problem, const KernelInfo& kernel) const override {
    return reference_backend().refuse(problem, kernel);
  }
  Plan plan_with(const Problem& problem, int kernel) const override {
    Plan plan = reference_backend().plan_with(problem, kernel);
    plan.backend = kind();
    plan.kernel_name = kernels()[kernel].name;
    return plan;
  }
  int choose(const Problem& problem) const override { return reference_backend().choose(problem); }
  void launch(const Plan& plan, const Problem& problem, const Operands& operands,
              const ExecutionContext& context) const override {
    reference_backend().launch(plan, problem, operands, context);
  }
};

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

CpuInfo query_cpu() {
  CpuInfo info;
  info.model = "CPU";
  info.threads = default_executor().concurrency();
  info.isa = "portable";
  info.isas = {"portable"};
  return info;
}

}  // namespace moegemm
