#include <charconv>
#include <utility>

#include "cuda/backend/launch/loading.h"
#include "cuda/sm80/heuristic.h"
#include "cuda/sm80/kernels.h"

/// Every NVIDIA GPU from Ampere up: cp.async and mma.sync. The last resort of newer GPUs, too.
namespace moegemm::cuda::sm80 {
namespace {

// Where the sm90 backend does not run.
const ListedKernels on_older_gpus([] { return layer_functions(kernels()); }, 8, 8);
const ListedKernels on_newer_gpus([] { return layer_functions(kernels()); }, 10, 1000);

std::string unavailable(const DeviceFacts& facts) {
  if (runs_on(compiled_archs(), facts.major, facts.minor)) return {};
  return "these kernels are compiled for " + std::string(compiled_archs()) +
         " and run on those and newer ones (MOEGEMM_CUDA_ARCHS)";
}

MachineLimits limits(const Problem& problem, const DeviceFacts& facts) {
  return {.flops_per_second = flops_per_clock(problem, facts.major, facts.minor) *
                              facts.multiprocessors * facts.clock_hz * 0.7,
          .bytes_per_second = facts.bytes_per_second * 0.85,
          .tile_bytes_per_second = 48.0 * facts.multiprocessors * facts.clock_hz,
          .units = facts.multiprocessors,
          .launch_us = 4};
}

}  // namespace

bool runs_on(std::string_view archs, int major, int minor) {
  int first = 0;
  std::from_chars(archs.data(), archs.data() + archs.size(), first);
  return first > 0 && major * 10 + minor >= first;
}

std::string_view compiled_archs() { return MOEGEMM_CUDA_ARCHS; }

double flops_per_clock(const Problem& problem, int major, int minor) {
  const bool data_centre = (major == 8 && minor == 0) || major == 9 || major == 10;
  if (problem.dtype == DType::kFloat32 && !problem.allow_tf32) {
    return major == 8 && minor == 0 ? 128 : 256;
  }
  // 645 TFLOP/s of mma.sync on an H200; consumer parts halve their rate for fp32 accumulation.
  const double tensor16 = !data_centre ? 512 : (major == 8 ? 2048 : 2468);
  return problem.dtype == DType::kFloat32 ? tensor16 / 2 : tensor16;
}

std::vector<KernelEntry> kernels() {
  std::vector<KernelEntry> all = row_gemm_kernels();
  for (KernelEntry& entry : stream_gemm_kernels(BackendKind::kSm80)) {
    all.push_back(std::move(entry));
  }
  for (KernelEntry& entry : weight_gemm_kernels()) all.push_back(std::move(entry));
  return all;
}

const Generation kGeneration = {.kind = BackendKind::kSm80,
                                .summary = "cp.async and mma.sync; the sm90 kernels need 9.0",
                                .unavailable = unavailable,
                                .choose_among = choose_among,
                                .limits = limits,
                                .aligning_first_is_faster = aligning_first_is_faster,
                                .dequantising_first_is_faster = dequantising_first_is_faster};

}  // namespace moegemm::cuda::sm80
