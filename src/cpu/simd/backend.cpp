#include <array>
#include <vector>

#include "core/planning/kernel_step.h"
#include "core/refusal.h"
#include "core/registry.h"
#include "cpu/parallel.h"
#include "cpu/simd/drivers.h"
#include "cpu/simd/isa/instruction_set.h"

namespace moegemm {
namespace cpu::simd {
namespace {

/// Positions in the kernel list.
enum Kernel { kForwardDot, kDxAdaptive, kDxPacked, kDxInPlace, kDwCached, kDwStreaming, kKernels };

TileShape dot_tile(const KernelTable& t) { return {t.dot_rows, 4, 2 * t.lanes}; }
TileShape packed_tile(const KernelTable& t) { return {t.tile_rows, t.tile_cols, 2}; }
TileShape in_place_tile(const KernelTable& t) { return {kMaxRowsInPlace, t.tile_cols, 2}; }
TileShape outer_tile(const KernelTable& t) { return {t.outer_rows, t.outer_cols, 2}; }

using Run = void (*)(const KernelTable&, const Problem&, const Operands&, const ExecutionContext&);
template <DxPath Path>
void run_dx_by(const KernelTable& table, const Problem& problem, const Operands& operands,
               const ExecutionContext& context) {
  run_dx(table, Path, problem, operands, context);
}
template <bool Stream>
void run_dw_to(const KernelTable& table, const Problem& problem, const Operands& operands,
               const ExecutionContext& context) {
  run_dw(table, Stream, problem, operands, context);
}

struct CpuKernel {
  const char* name;
  Op op;
  TileShape (*tile)(const KernelTable&);
  Run run;
};
constexpr std::array<CpuKernel, kKernels> kList = {{
    {"forward_dot", Op::kForward, dot_tile, run_forward},
    {"dX_adaptive", Op::kDx, packed_tile, run_dx_by<DxPath::kAdaptive>},
    {"dX_packed", Op::kDx, packed_tile, run_dx_by<DxPath::kPacked>},
    {"dX_in_place", Op::kDx, in_place_tile, run_dx_by<DxPath::kInPlace>},
    {"dW_cached", Op::kDw, outer_tile, run_dw_to<false>},
    {"dW_streaming", Op::kDw, outer_tile, run_dw_to<true>},
}};

std::vector<KernelInfo> list_kernels(InstructionSet isa) {
  std::vector<KernelInfo> list;
  for (const CpuKernel& kernel : kList) {
    list.push_back({BackendKind::kCpu, join(to_string(isa), "_", kernel.name), kernel.op,
                    kernel.tile(kernels_of(isa)), 1});
  }
  return list;
}

/// dW is written past the caches up to this many rows per expert: the stores then dominate (+13% to
/// 63% up to 16 rows, nothing beyond 64).
constexpr std::int64_t kMaxStreamedRows = 64;

/// The kernels of one instruction set, or of the active one.
class CpuBackend final : public Backend {
 public:
  CpuBackend() = default;
  explicit CpuBackend(InstructionSet isa) : isa_(isa) {}

  BackendKind kind() const override { return BackendKind::kCpu; }

  std::string unavailable(Device device) const override {
    if (device.type == DeviceType::kCpu) return {};
    return join("it runs on the CPU, the tensors are on ", to_string(device));
  }

  std::span<const KernelInfo> kernels() const override {
    static const std::array<std::vector<KernelInfo>, 4> lists = [] {
      std::array<std::vector<KernelInfo>, 4> all;
      for (InstructionSet isa : usable_instruction_sets()) {
        all[static_cast<std::size_t>(isa)] = list_kernels(isa);
      }
      return all;
    }();
    return lists[static_cast<std::size_t>(instruction_set())];
  }

  std::string refuse(const Problem& problem, const KernelInfo& kernel) const override {
    if (kernel.op != problem.op) return join(kernel.name, " computes ", to_string(kernel.op));
    if (std::string reason = refuse_weights(problem, kernel); !reason.empty()) return reason;
    if (problem.activation) return join(kernel.name, " leaves the activation to a pass after it");
    if (problem.accumulate && kernel.name == kernels()[kDwStreaming].name) {
      return join(kernel.name, " does not read the output, accumulate does");
    }
    return {};
  }

  Step plan_with(const Problem&, int kernel) const override {
    return kernel_step(kernels()[kernel], kernel, default_executor().concurrency());
  }

  int choose(const Problem& problem) const override {
    switch (problem.op) {
      case Op::kForward:
        return kForwardDot;
      case Op::kDx:
        return kDxAdaptive;
      case Op::kDw:
        break;
    }
    const bool few_rows = problem.rows <= kMaxStreamedRows * problem.experts;
    return few_rows && !problem.accumulate ? kDwStreaming : kDwCached;
  }

  MachineLimits limits(const Problem& problem) const override {
    // Per core at 3 GHz: two multiply-adds of the vector width per cycle, of which the kernels
    // reach about two thirds. bf16 dot products double it where the hardware has them.
    const InstructionSet isa = instruction_set();
    double flops = kernels_of(isa).lanes * 2 * 2 * 3e9 * 0.65;
    if (isa == InstructionSet::kAvx512Bf16 && problem.dtype == DType::kBFloat16) flops *= 2;
    MachineLimits limits;
    limits.units = default_executor().concurrency();
    limits.flops_per_second = flops * limits.units;
    limits.bytes_per_second = 10e9 * limits.units;  // a server core's share of its memory
    limits.launch_us = 5;
    return limits;
  }

  void launch(const Step& step, const Problem& problem, const Operands& operands,
              const ExecutionContext& context) const override {
    if (step.kernel < 0 || step.kernel >= kKernels) {
      throw Error(ErrorKind::kRuntime,
                  join("the plan asks for kernel ", step.kernel, " of the cpu backend, which has ",
                       static_cast<int>(kKernels)));
    }
    kList[static_cast<std::size_t>(step.kernel)].run(kernels_of(instruction_set()), problem,
                                                     operands, context);
  }

 private:
  InstructionSet instruction_set() const { return isa_ ? *isa_ : active_instruction_set(); }

  std::optional<InstructionSet> isa_;
};

}  // namespace

const Backend& backend_for(InstructionSet isa) {
  static const std::array<CpuBackend, 4> backends = {
      CpuBackend(InstructionSet::kAvx512Bf16), CpuBackend(InstructionSet::kAvx512),
      CpuBackend(InstructionSet::kAvx2), CpuBackend(InstructionSet::kPortable)};
  return backends[static_cast<std::size_t>(isa)];
}

}  // namespace cpu::simd

const Backend& cpu_backend() {
  static const cpu::simd::CpuBackend backend;
  return backend;
}

}  // namespace moegemm
