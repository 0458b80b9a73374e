#include <algorithm>
#include <iterator>
#include <string_view>
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
constexpr CpuKernel kList[] = {
    {"forward_dot", Op::kForward, dot_tile, run_forward},
    {"dX_adaptive", Op::kDx, packed_tile, run_dx_by<DxPath::kAdaptive>},
    {"dX_packed", Op::kDx, packed_tile, run_dx_by<DxPath::kPacked>},
    {"dX_in_place", Op::kDx, in_place_tile, run_dx_by<DxPath::kInPlace>},
    {"dW_cached", Op::kDw, outer_tile, run_dw_to<false>},
    {"dW_streaming", Op::kDw, outer_tile, run_dw_to<true>},
};

/// Of a name that is listed: another one does not compile.
consteval int position_of(std::string_view name) {
  int position = 0;
  while (kList[position].name != name) ++position;
  return position;
}
constexpr int kForwardDot = position_of("forward_dot");
constexpr int kDxAdaptive = position_of("dX_adaptive");
constexpr int kDwCached = position_of("dW_cached");
constexpr int kDwStreaming = position_of("dW_streaming");

struct KernelList {
  explicit KernelList(InstructionSet set) : isa(set) {
    for (const CpuKernel& kernel : kList) {
      kernels.push_back({BackendKind::kCpu, join(to_string(isa), "_", kernel.name), kernel.op,
                         kernel.tile(kernels_of(isa)), 1});
    }
  }

  InstructionSet isa;
  std::vector<KernelInfo> kernels;
};

/// One `Entry` for each instruction set that can be used, made of it.
template <class Entry>
std::vector<Entry> for_each_set() {
  std::vector<Entry> entries;
  for (const InstructionSet isa : usable_instruction_sets()) entries.emplace_back(isa);
  return entries;
}

/// dW is written past the caches up to this many rows per expert: the stores then dominate (+13% to
/// 63% up to 16 rows, nothing beyond 64).
constexpr std::int64_t kMaxStreamedRows = 64;

/// Forward decodes whole rows of a quantised W, four at a time, into scratch.
constexpr std::int64_t kMostDecodedBytes = 128 * 1024;

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
    static const std::vector<KernelList> lists = for_each_set<KernelList>();
    const InstructionSet isa = instruction_set();
    return std::find_if(lists.begin(), lists.end(),
                        [isa](const KernelList& list) { return list.isa == isa; })
        ->kernels;
  }

  std::string refuse(const Problem& problem, const KernelInfo& kernel) const override {
    if (kernel.op != problem.op) return join(kernel.name, " computes ", to_string(kernel.op));
    if (!problem.quantization.plain() &&
        problem.k * size_bytes(problem.dtype) > kMostDecodedBytes) {
      return join("K = ", problem.k, " is too long for decoded rows to stay in a cache");
    }
    if (problem.activation) return join(kernel.name, " leaves the activation to a pass after it");
    if (problem.accumulate && kernel.name == kernels()[kDwStreaming].name) {
      return join(kernel.name, " does not read the output, accumulate does");
    }
    return {};
  }

  Step plan_with(const Problem&, int kernel) const override {
    return kernel_step(kernels()[kernel], kernel);
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
    if (step.kernel < 0 || step.kernel >= std::ssize(kList)) {
      throw Error(ErrorKind::kRuntime, join("the plan asks for kernel ", step.kernel,
                                            " of the cpu backend, which has ", std::size(kList)));
    }
    kList[step.kernel].run(kernels_of(instruction_set()), problem, operands, context);
  }

  InstructionSet instruction_set() const { return isa_ ? *isa_ : active_instruction_set(); }

 private:
  std::optional<InstructionSet> isa_;
};

}  // namespace

const Backend& backend_for(InstructionSet isa) {
  static const std::vector<CpuBackend> backends = for_each_set<CpuBackend>();
  return *std::find_if(backends.begin(), backends.end(), [isa](const CpuBackend& backend) {
    return backend.instruction_set() == isa;
  });
}

}  // namespace cpu::simd

const Backend& cpu_backend() {
  static const cpu::simd::CpuBackend backend;
  return backend;
}

}  // namespace moegemm
