#include "core/backend.h"

#include <limits>
#include <string>
#include <vector>

#include "core/registry.h"
#include "cuda/host/device_facts.h"
#include "cuda/sm90/heuristic.h"
#include "cuda/sm90/kernel_entry.h"
#include "moegemm/error.h"

namespace moegemm {
namespace {

using cuda::DeviceFacts;
using cuda::sm90::KernelEntry;

std::vector<KernelEntry> all_entries() {
  std::vector<KernelEntry> entries;
  for (const auto& family : {cuda::sm90::row_gemm_kernels(), cuda::sm90::weight_gemm_kernels()}) {
    entries.insert(entries.end(), family.begin(), family.end());
  }
  return entries;
}

/// Hopper: TMA, wgmma, persistent kernels that are compiled ahead of time.
class Sm90Backend final : public Backend {
 public:
  Sm90Backend() : entries_(all_entries()) {
    for (const KernelEntry& entry : entries_) infos_.push_back(entry.info);
  }

  BackendKind kind() const override { return BackendKind::kSm90; }

  std::string unavailable(Device device) const override {
    const DeviceFacts* facts = nullptr;
    if (std::string reason = cuda::find_device(device, facts); !reason.empty()) return reason;
    return facts->major == 9 ? "" : cuda::capability_of(*facts) + ", these kernels need 9.0";
  }

  std::span<const KernelInfo> kernels() const override { return infos_; }

  std::string refuse(const Problem& problem, const KernelInfo& kernel) const override {
    if (problem.dtype != DType::kBFloat16 && problem.dtype != DType::kFloat16) {
      return std::string("inputs are ") + to_string(problem.dtype) + ", must be bf16 or fp16";
    }
    if (problem.input_alignment < 16) {
      return "the inputs' base addresses and row pitches must be multiples of 16 bytes, they are "
             "of " +
             std::to_string(problem.input_alignment) + " (TMA)";
    }
    constexpr std::int64_t kMost = std::numeric_limits<int>::max() / 2;
    if (problem.rows > kMost || problem.slots > kMost || problem.n > kMost || problem.k > kMost ||
        problem.experts > kMost) {
      return "M, N, K and E must be below 2^30";
    }
    const DeviceFacts* facts = cuda::device_facts(problem.device.index);
    if (!facts) return cuda::why_no_device();
    for (const KernelEntry& entry : entries_) {
      if (entry.info.name == kernel.name) return entry.refuse(entry, problem, *facts);
    }
    return "is not a kernel of this backend";
  }

  Step plan_with(const Problem& problem, int kernel) const override {
    const KernelEntry& entry = entries_.at(static_cast<std::size_t>(kernel));
    return cuda::kernel_step(
        entry.info, kernel,
        entry.policy(entry, problem, *cuda::device_facts(problem.device.index)));
  }

  int choose(const Problem& problem) const override {
    return cuda::sm90::choose(entries_, problem, *cuda::device_facts(problem.device.index));
  }

  bool fusing_is_faster(const Problem& problem) const override {
    const int kernel = choose(problem);
    return kernel >= 0 && cuda::sm90::fusing_is_faster(
                              problem, entries_[static_cast<std::size_t>(kernel)].info.tile);
  }

  bool gathering_first_is_faster(const Problem& problem) const override {
    return cuda::sm90::gathering_first_is_faster(problem);
  }

  /// The tensor cores read dW's operands from shared memory as TMA has put them there.
  bool scales_first(const Problem&) const override { return true; }

  MachineLimits limits(const Problem& problem) const override {
    const DeviceFacts* facts = cuda::device_facts(problem.device.index);
    if (!facts) return {};
    MachineLimits limits;
    limits.units = facts->multiprocessors;
    // 4096 16-bit operations per multiprocessor and clock; the power limit leaves two thirds.
    limits.flops_per_second = 4096.0 * facts->multiprocessors * facts->clock_hz * 0.67;
    limits.bytes_per_second = facts->bytes_per_second * 0.88;  // 4.3 of an H200's 4.9 TB/s
    // 48 bytes per multiprocessor and clock from L2: what the narrowest tiles were seen to take.
    limits.tile_bytes_per_second = 48.0 * facts->multiprocessors * facts->clock_hz;
    limits.launch_us = 4;
    return limits;
  }

  void launch(const Step& step, const Problem& problem, const Operands& operands,
              const ExecutionContext& context) const override {
    const cuda::DeviceGuard guard(problem.device.index);
    const KernelEntry& entry = entries_.at(static_cast<std::size_t>(step.kernel));
    entry.launch(entry, step, problem, operands, static_cast<cudaStream_t>(context.stream));
  }

 private:
  std::vector<KernelEntry> entries_;
  std::vector<KernelInfo> infos_;
};

}  // namespace

const Backend& sm90_backend() {
  static const Sm90Backend backend;
  return backend;
}

}  // namespace moegemm
