#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string>

#include "core/backend.h"
#include "cuda/host/device_facts.h"
#include "cuda/host/launch_policy.h"
#include "cuda/sm80/tile/traits.h"

namespace moegemm::cuda::sm80 {

constexpr int kAnyMajor = 99;

/// One line of instances/sm80_kernels.inc with its compiled functions. bf16 and fp16 are variants
/// of one kernel.
struct CompiledKernel {
  KernelInfo info;
  Math math = Math::kTensor16;
  Loads loads = Loads::kVectors;
  int least_major = 8;  ///< of the compute capability
  int most_major = kAnyMajor;
  int threads = 0;
  bool copies_apart = false;  ///< some warps do nothing but copy
  int blocks_per_multiprocessor = 0;
  std::int64_t (*smem_bytes)(std::int64_t experts) = nullptr;
  const void* functions[2] = {};  ///< bf16 and fp16, or fp32

  const void* function(DType dtype) const { return functions[dtype == DType::kFloat16]; }
};

std::span<const CompiledKernel> compiled_kernels();

/// Output tiles at most, for any m_sizes.
std::int64_t most_tiles(const CompiledKernel& kernel, const Problem& problem);

/// Thread blocks of this kernel that a multiprocessor runs at the same time.
int resident_blocks(const CompiledKernel& kernel, const Problem& problem, const DeviceFacts& facts);

/// What a launch is told. Thread blocks: as many as run at the same time, or as there are tiles.
LaunchPolicy policy(const CompiledKernel& kernel, const Problem& problem, const DeviceFacts& facts);

/// The feasibility predicate of one kernel; empty if it runs the problem.
std::string refuse(const CompiledKernel& kernel, const Problem& problem, const DeviceFacts& facts);

/// Forward and dX.
void launch_rows(const CompiledKernel& kernel, const Step& step, const Problem& problem,
                 const Operands& operands, cudaStream_t stream);
/// dW.
void launch_weights(const CompiledKernel& kernel, const Step& step, const Problem& problem,
                    const Operands& operands, cudaStream_t stream);

}  // namespace moegemm::cuda::sm80
