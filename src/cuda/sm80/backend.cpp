#include "core/backend.h"

#include <string>
#include <vector>

#include "core/registry.h"
#include "cuda/host/device_facts.h"
#include "cuda/sm80/plan/compiled_kernel.h"
#include "cuda/sm80/plan/compute_capability.h"
#include "cuda/sm80/plan/heuristic.h"

namespace moegemm {
namespace {

using cuda::DeviceFacts;
using cuda::sm80::CompiledKernel;

/// Every NVIDIA GPU from Ampere up: cp.async and mma.sync, persistent kernels that are compiled
/// ahead of time. The last resort of newer GPUs, too.
class Sm80Backend final : public Backend {
 public:
  Sm80Backend() : kernels_(cuda::sm80::compiled_kernels()) {
    for (const CompiledKernel& kernel : kernels_) infos_.push_back(kernel.info);
  }

  BackendKind kind() const override { return BackendKind::kSm80; }

  std::string unavailable(Device device) const override {
    const DeviceFacts* facts = nullptr;
    if (std::string reason = cuda::find_device(device, facts); !reason.empty()) return reason;
    if (cuda::sm80::runs_on(cuda::sm80::compiled_archs(), facts->major, facts->minor)) return {};
    return cuda::capability_of(*facts) + ", these kernels are compiled for " +
           std::string(cuda::sm80::compiled_archs()) +
           " and run on those and newer ones (MOEGEMM_CUDA_ARCHS)";
  }

  std::span<const KernelInfo> kernels() const override { return infos_; }

  std::string refuse(const Problem& problem, const KernelInfo& kernel) const override {
    const DeviceFacts* facts = cuda::device_facts(problem.device.index);
    if (!facts) return cuda::why_no_device();
    for (const CompiledKernel& compiled : kernels_) {
      if (compiled.info.name == kernel.name) {
        return cuda::sm80::refuse(compiled, problem, *facts);
      }
    }
    return "is not a kernel of this backend";
  }

  Step plan_with(const Problem& problem, int kernel) const override {
    const CompiledKernel& compiled = kernels_[static_cast<std::size_t>(kernel)];
    return cuda::kernel_step(
        compiled.info, kernel,
        cuda::sm80::policy(compiled, problem, *cuda::device_facts(problem.device.index)));
  }

  int choose(const Problem& problem) const override {
    return cuda::sm80::choose(kernels_, problem, *cuda::device_facts(problem.device.index));
  }

  /// Its kernels multiply dY on the way; what has memory has X scaled, as before sm90's kernels.
  bool scales_first(const Problem&) const override { return true; }

  MachineLimits limits(const Problem& problem) const override {
    const DeviceFacts* facts = cuda::device_facts(problem.device.index);
    if (!facts) return {};
    MachineLimits limits;
    limits.units = facts->multiprocessors;
    limits.flops_per_second = cuda::sm80::flops_per_clock(problem, facts->major, facts->minor) *
                              facts->multiprocessors * facts->clock_hz * 0.7;
    limits.bytes_per_second = facts->bytes_per_second * 0.85;
    limits.tile_bytes_per_second = 48.0 * facts->multiprocessors * facts->clock_hz;
    limits.launch_us = 4;
    return limits;
  }

  void launch(const Step& step, const Problem& problem, const Operands& operands,
              const ExecutionContext& context) const override {
    const cuda::DeviceGuard guard(problem.device.index);
    const CompiledKernel& kernel = kernels_[static_cast<std::size_t>(step.kernel)];
    const auto stream = static_cast<cudaStream_t>(context.stream);
    if (problem.op == Op::kDw) {
      cuda::sm80::launch_weights(kernel, step, problem, operands, stream);
    } else {
      cuda::sm80::launch_rows(kernel, step, problem, operands, stream);
    }
  }

 private:
  std::span<const CompiledKernel> kernels_;
  std::vector<KernelInfo> infos_;
};

}  // namespace

const Backend& sm80_backend() {
  static const Sm80Backend backend;
  return backend;
}

}  // namespace moegemm
