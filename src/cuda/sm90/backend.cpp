#include "core/backend.h"

#include "core/registry.h"
#include "cuda/host/device_facts.h"
#include "moegemm/error.h"

namespace moegemm {
namespace {

/// A build without Hopper kernels: never available, and says so.
class Sm90Backend final : public Backend {
 public:
  BackendKind kind() const override { return BackendKind::kSm90; }

  std::string unavailable(Device device) const override {
    if (device.type != DeviceType::kCuda) {
      return "runs on CUDA devices only";
    }
    if (!cuda::device_facts(device.index)) {
      return cuda::device_count() == 0
                 ? cuda::why_no_device()
                 : "no CUDA device with number " + std::to_string(device.index);
    }
    return "no Hopper kernels are compiled in";
  }

  std::span<const KernelInfo> kernels() const override { return {}; }

  std::string refuse(const Problem&, const KernelInfo&) const override {
    return "no Hopper kernels are compiled in";
  }

  Plan plan_with(const Problem&, int) const override { refuse_to_run(); }
  int choose(const Problem&) const override { refuse_to_run(); }
  void launch(const Plan&, const Problem&, const Operands&,
              const ExecutionContext&) const override {
    refuse_to_run();
  }

 private:
  [[noreturn]] static void refuse_to_run() {
    throw Error(ErrorKind::kNotImplemented, "backend sm90: no Hopper kernels are compiled in");
  }
};

}  // namespace

const Backend& sm90_backend() {
  static const Sm90Backend backend;
  return backend;
}

}  // namespace moegemm
