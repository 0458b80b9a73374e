#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string>

#include "core/backend.h"
#include "cuda/host/device_facts.h"
#include "cuda/host/launch_policy.h"

namespace moegemm::cuda::sm90 {

/// One compiled kernel of the Hopper backend: what it is, what it can run and how to start it.
/// dtype (bf16, fp16) and the way rows are loaded (TMA or gathered) are variants inside an entry.
struct KernelEntry {
  KernelInfo info;
  /// What a launch for this problem is told: the grid, the order of tiles, the cache policy.
  LaunchPolicy (*policy)(const KernelEntry& entry, const Problem& problem,
                         const DeviceFacts& facts);
  /// Empty if it can run; else the reason as a clause. Alignment, dtype and size rules that hold
  /// for every Hopper kernel are checked by the backend before.
  std::string (*refuse)(const KernelEntry& entry, const Problem& problem, const DeviceFacts& facts);
  void (*launch)(const KernelEntry& entry, const Step& step, const Problem& problem,
                 const Operands& operands, cudaStream_t stream);
  /// Position in its family's table of compiled functions.
  int family_index;
};

std::span<const KernelEntry> row_gemm_kernels();     ///< forward and dX
std::span<const KernelEntry> weight_gemm_kernels();  ///< dW

}  // namespace moegemm::cuda::sm90
