#pragma once

#include "cuda/sm80/plan/compiled_kernel.h"

namespace moegemm::cuda::sm80 {

/// The rank of a feasible kernel for a problem: less is better, equal ranks go by list order. Host
/// facts only.
int preference_rank(const CompiledKernel& kernel, const Problem& problem, const DeviceFacts& facts);

/// The position of the kernel that should be fastest on a GPU with these facts; -1: none can run.
int choose(std::span<const CompiledKernel> kernels, const Problem& problem,
           const DeviceFacts& facts);

}  // namespace moegemm::cuda::sm80
