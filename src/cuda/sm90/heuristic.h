#pragma once

#include <span>

#include "cuda/sm90/kernel_entry.h"

namespace moegemm::cuda::sm90 {

/// The rank of a feasible kernel for a problem: less is better, equal ranks go by list order. Host
/// facts only.
int preference_rank(const KernelInfo& kernel, const Problem& problem);

/// The position of the kernel that should be fastest on a GPU with these facts; -1: none can run.
int choose(std::span<const KernelEntry> kernels, const Problem& problem, const DeviceFacts& facts);

}  // namespace moegemm::cuda::sm90
