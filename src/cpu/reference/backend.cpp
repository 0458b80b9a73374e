#include <array>

#include "core/planning/kernel_step.h"
#include "core/refusal.h"
#include "core/registry.h"
#include "cpu/reference/products.h"

namespace moegemm {
namespace {

class ReferenceBackend final : public Backend {
 public:
  BackendKind kind() const override { return BackendKind::kReference; }

  std::string unavailable(Device device) const override {
    if (device.type == DeviceType::kCpu) return {};
    return join("it runs on the CPU, the tensors are on ", to_string(device));
  }

  std::span<const KernelInfo> kernels() const override {
    static const std::array<KernelInfo, 3> list = {
        KernelInfo{BackendKind::kReference, "reference_forward", Op::kForward, {1, 1, 1}, 1},
        KernelInfo{BackendKind::kReference, "reference_dX", Op::kDx, {1, 1, 1}, 1},
        KernelInfo{BackendKind::kReference, "reference_dW", Op::kDw, {1, 1, 1}, 1},
    };
    return list;
  }

  std::string refuse(const Problem& problem, const KernelInfo& kernel) const override {
    if (kernel.op != problem.op) return join(kernel.name, " computes ", to_string(kernel.op));
    return problem.ups_apart ? "reads gates and ups from one tensor" : "";
  }

  Step plan_with(const Problem&, int kernel) const override {
    return kernel_step(kernels()[kernel], kernel);
  }

  int choose(const Problem& problem) const override {
    int kernel = 0;
    while (kernels()[kernel].op != problem.op) ++kernel;  // each op has one
    return kernel;
  }

  void launch(const Step&, const Problem& problem, const Operands& operands,
              const ExecutionContext&) const override {
    cpu::reference::run(problem, operands);
  }
};

}  // namespace

const Backend& reference_backend() {
  static const ReferenceBackend backend;
  return backend;
}

}  // namespace moegemm
