#include <utility>

#include "cuda/backend/launch/loading.h"
#include "cuda/sm80/kernels.h"
#include "cuda/sm90/heuristic.h"
#include "cuda/sm90/kernels.h"

/// Hopper: TMA and wgmma.
namespace moegemm::cuda::sm90 {
namespace {

const ListedKernels listed([] { return layer_functions(kernels()); }, 9, 9);

std::string unavailable(const DeviceFacts& facts) {
  return facts.major == 9 ? "" : "these kernels need 9.0";
}

MachineLimits limits(const Problem& problem, const DeviceFacts& facts) {
  const double clocks = facts.multiprocessors * facts.clock_hz;  // of all multiprocessors, a second
  MachineLimits limits;
  limits.units = facts.multiprocessors;
  // Of 16 bits, half as many of TF32; the power limit leaves two thirds.
  const double flops_per_clock = problem.dtype == DType::kFloat32 ? 2048 : 4096;
  limits.flops_per_second = flops_per_clock * clocks * 0.67;
  limits.bytes_per_second = facts.bytes_per_second * 0.88;  // 4.3 of an H200's 4.9 TB/s
  limits.tile_bytes_per_second = 48 * clocks;  // from L2: what the narrowest tiles took
  limits.launch_us = 4;
  return limits;
}

}  // namespace

std::string refuse_operands(const Problem& problem, bool tf32) {
  const bool fp32 = problem.dtype == DType::kFloat32;
  if (fp32 && !problem.allow_tf32) return "inputs are fp32, and TF32 is not allowed";
  if (fp32 != tf32) {
    return std::string("inputs are ") + to_string(problem.dtype) +
           (tf32 ? ", must be fp32" : ", must be bf16 or fp16");
  }
  if (problem.input_alignment < 16) {
    return "the inputs' base addresses and row pitches must be multiples of 16 bytes, they are "
           "of " +
           std::to_string(problem.input_alignment) + " (TMA)";
  }
  return {};
}

std::vector<KernelEntry> kernels() {
  std::vector<KernelEntry> all = row_gemm_kernels();
  for (KernelEntry& entry : sm80::stream_gemm_kernels(BackendKind::kSm90)) {
    all.push_back(std::move(entry));
  }
  for (KernelEntry& entry : weight_gemm_kernels()) all.push_back(std::move(entry));
  return all;
}

const Generation kGeneration = {
    .kind = BackendKind::kSm90,
    .summary = "TMA and wgmma; sm80 runs fp32 without TF32 and what is not aligned to 16 bytes",
    .unavailable = unavailable,
    .choose_among = choose_among,
    .limits = limits,
    .fusing_is_faster = fusing_is_faster,
    .gathering_first_is_faster = gathering_first_is_faster,
    .dequantising_first_is_faster = dequantising_first_is_faster};

}  // namespace moegemm::cuda::sm90
