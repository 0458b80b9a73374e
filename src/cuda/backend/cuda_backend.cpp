#include "cuda/backend/cuda_backend.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "core/planning/kernel_step.h"

namespace moegemm::cuda {
namespace {

/// Of the problem's device, as much of it as the problem may take.
DeviceFacts facts_for(const Problem& problem) {
  DeviceFacts facts = *device_facts(problem.device.index);
  if (problem.max_multiprocessors > 0) {
    facts.multiprocessors = std::min(facts.multiprocessors, problem.max_multiprocessors);
  }
  return facts;
}

}  // namespace

int choose(const Generation& generation, std::span<const KernelEntry> kernels,
           const Problem& problem, const DeviceFacts& facts) {
  constexpr std::size_t kMostKernels = 32;  // of one op
  std::array<const KernelEntry*, kMostKernels> feasible = {};
  std::size_t count = 0;
  for (const KernelEntry& entry : kernels) {
    // The many that are for other weights cost no refusal's text.
    if (entry.info.op != problem.op || entry.info.weights != problem.quantization.format) continue;
    if (count == kMostKernels) break;
    if (cuda::refuse(entry, problem, facts).empty()) feasible[count++] = &entry;
  }
  if (count == 0) return -1;
  const int chosen = generation.choose_among({feasible.data(), count}, problem, facts);
  return static_cast<int>(feasible[static_cast<std::size_t>(chosen)] - kernels.data());
}

CudaBackend::CudaBackend(const Generation& generation, std::vector<KernelEntry> kernels)
    : generation_(generation), entries_(std::move(kernels)) {
  for (const KernelEntry& entry : entries_) infos_.push_back(entry.info);
}

std::string CudaBackend::unavailable(Device device) const {
  const DeviceFacts* facts = nullptr;
  if (std::string reason = find_device(device, facts); !reason.empty()) return reason;
  const std::string reason = generation_.unavailable(*facts);
  return reason.empty() ? "" : capability_of(*facts) + ", " + reason;
}

std::string CudaBackend::refuse(const Problem& problem, const KernelInfo& kernel) const {
  const DeviceFacts* facts = device_facts(problem.device.index);
  if (!facts) return why_no_device();
  for (const KernelEntry& entry : entries_) {
    if (entry.info.name == kernel.name) return cuda::refuse(entry, problem, *facts);
  }
  return "is not a kernel of this backend";
}

Step CudaBackend::plan_with(const Problem& problem, int kernel) const {
  const KernelEntry& entry = entries_.at(static_cast<std::size_t>(kernel));
  const LaunchPolicy policy = entry.grid(entry, problem, facts_for(problem));
  Step step = kernel_step(entry.info, kernel, policy.grid);
  if (policy.tile_rows > 0) step.tile.rows = policy.tile_rows;
  step.smem_bytes = policy.smem_bytes > 0 ? policy.smem_bytes : entry.smem_bytes(problem);
  step.order = policy.order;
  step.weights = policy.weights;
  step.start = policy.start;
  return step;
}

int CudaBackend::choose(const Problem& problem) const {
  return cuda::choose(generation_, entries_, problem, facts_for(problem));
}

bool CudaBackend::fusing_is_faster(const Problem& problem) const {
  if (!generation_.fusing_is_faster) return true;
  const int kernel = choose(problem);
  return kernel >= 0 && generation_.fusing_is_faster(
                            problem, entries_[static_cast<std::size_t>(kernel)].info.tile);
}

bool CudaBackend::gathering_first_is_faster(const Problem& problem) const {
  return generation_.gathering_first_is_faster && generation_.gathering_first_is_faster(problem);
}

bool CudaBackend::aligning_first_is_faster(const Problem& problem) const {
  return generation_.aligning_first_is_faster && generation_.aligning_first_is_faster(problem);
}

bool CudaBackend::dequantising_first_is_faster(const Problem& problem) const {
  return generation_.dequantising_first_is_faster &&
         generation_.dequantising_first_is_faster(problem);
}

MachineLimits CudaBackend::limits(const Problem& problem) const {
  return device_facts(problem.device.index) ? generation_.limits(problem, facts_for(problem))
                                            : MachineLimits{};
}

void CudaBackend::launch(const Step& step, const Problem& problem, const Operands& operands,
                         const ExecutionContext& context) const {
  const DeviceGuard guard(problem.device.index);
  const KernelEntry& entry = entries_.at(static_cast<std::size_t>(step.kernel));
  entry.launch(entry, step, problem, operands, static_cast<cudaStream_t>(context.stream));
}

}  // namespace moegemm::cuda
