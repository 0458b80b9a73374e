#pragma once

#include <span>

#include "cuda/backend/kernel_entry.h"

namespace moegemm::cuda::sm80 {

/// The rank of a feasible kernel for a problem: less is better, equal ranks go by list order. Host
/// facts only.
int preference_rank(const KernelEntry& kernel, const Problem& problem, const DeviceFacts& facts);

/// Whether a kernel of ./stream_gemm, where one can run, is the fastest for a quantised W: few rows
/// for each expert in use.
bool streaming_is_faster(const Problem& problem);
/// The position of the kernel of those that should be fastest; -1: there is none.
int choose_streaming(std::span<const KernelEntry* const> feasible, const Problem& problem);
bool streams_weights(const KernelInfo& kernel);  ///< is such a kernel

/// Whether a problem that is not aligned is faster on aligned copies of its inputs.
bool aligning_first_is_faster(const Problem& problem);

/// Whether a pass over W and then a plain kernel are faster than a kernel that decodes W.
bool dequantising_first_is_faster(const Problem& problem);

/// The position of the kernel that should be fastest among those that can run the problem.
int choose_among(std::span<const KernelEntry* const> feasible, const Problem& problem,
                 const DeviceFacts& facts);

}  // namespace moegemm::cuda::sm80
