#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/backend.h"
#include "cuda/backend/kernel_entry.h"

namespace moegemm::cuda {

/// What a generation of kernels has besides its entries. All of it goes by host facts only.
struct Generation {
  BackendKind kind = BackendKind::kSm80;
  const char* summary = "";  ///< what it uses, and what others do: for `moegemm info`
  /// Why none of the kernels runs on a GPU, after its name and compute capability; empty: some do.
  std::string (*unavailable)(const DeviceFacts& facts) = nullptr;
  /// The position of the kernel that should be fastest. All of them, one at least, can run.
  int (*choose_among)(std::span<const KernelEntry* const> feasible, const Problem& problem,
                      const DeviceFacts& facts) = nullptr;
  MachineLimits (*limits)(const Problem& problem, const DeviceFacts& facts) = nullptr;
  /// Whether the kernel with this tile, which activates its results, is faster than the best other
  /// one with a pass after it; null: no kernel does.
  bool (*fusing_is_faster)(const Problem& problem, const TileShape& tile) = nullptr;
  /// Whether dW is faster after a copy of the gathered operand in order; null: never.
  bool (*gathering_first_is_faster)(const Problem& problem) = nullptr;
  /// Whether a problem is faster after copies of its inputs into aligned rows; null: never.
  bool (*aligning_first_is_faster)(const Problem& problem) = nullptr;
  /// Whether plain kernels after a pass that dequantises W are faster than those that decode it;
  /// null: never.
  bool (*dequantising_first_is_faster)(const Problem& problem) = nullptr;
};

/// The position of the kernel that should be fastest on a GPU with these facts; -1: none can run.
int choose(const Generation& generation, std::span<const KernelEntry> kernels,
           const Problem& problem, const DeviceFacts& facts);

/// Persistent kernels of one generation, compiled ahead of time.
class CudaBackend final : public Backend {
 public:
  CudaBackend(const Generation& generation, std::vector<KernelEntry> kernels);

  const Generation& generation() const { return generation_; }
  BackendKind kind() const override { return generation_.kind; }
  std::string unavailable(Device device) const override;
  std::span<const KernelInfo> kernels() const override { return infos_; }
  std::string refuse(const Problem& problem, const KernelInfo& kernel) const override;
  Step plan_with(const Problem& problem, int kernel) const override;
  int choose(const Problem& problem) const override;
  bool fusing_is_faster(const Problem& problem) const override;
  bool fills_gaps() const override { return false; }
  bool gathering_first_is_faster(const Problem& problem) const override;
  bool aligning_first_is_faster(const Problem& problem) const override;
  bool dequantising_first_is_faster(const Problem& problem) const override;
  /// Hopper's tensor cores read dW's operands from shared memory as TMA has put them there; the
  /// kernels that multiply dY on the way do as those, where there is memory.
  bool scales_first(const Problem&) const override { return true; }
  MachineLimits limits(const Problem& problem) const override;
  void launch(const Step& step, const Problem& problem, const Operands& operands,
              const ExecutionContext& context) const override;

 private:
  Generation generation_;
  std::vector<KernelEntry> entries_;
  std::vector<KernelInfo> infos_;
};

}  // namespace moegemm::cuda
