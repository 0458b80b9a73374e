#include "cuda/sm80/plan/compute_capability.h"

#include <charconv>

namespace moegemm::cuda::sm80 {

bool runs_on(std::string_view archs, int major, int minor) {
  int first = 0;
  std::from_chars(archs.data(), archs.data() + archs.size(), first);
  return first > 0 && major * 10 + minor >= first;
}

double flops_per_clock(const Problem& problem, int major, int minor) {
  const bool data_centre = (major == 8 && minor == 0) || major == 9 || major == 10;
  if (problem.dtype == DType::kFloat32 && !problem.allow_tf32) {
    return major == 8 && minor == 0 ? 128 : 256;
  }
  // 645 TFLOP/s of mma.sync on an H200; consumer parts halve their rate for fp32 accumulation.
  const double tensor16 = !data_centre ? 512 : (major == 8 ? 2048 : 2468);
  return problem.dtype == DType::kFloat32 ? tensor16 / 2 : tensor16;
}

std::string_view compiled_archs() { return MOEGEMM_CUDA_ARCHS; }

}  // namespace moegemm::cuda::sm80
