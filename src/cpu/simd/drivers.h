#pragma once

#include <algorithm>

#include "core/backend.h"
#include "cpu/simd/kernel_table.h"

/// One call from its pointers to the last store: cuts the problem into blocks, finds the rows of
/// each and hands them to the kernels of one instruction set.
namespace moegemm::cpu::simd {

enum class DxPath {
  kAdaptive,  ///< in place for experts with few rows, packed for the others
  kPacked,
  kInPlace,
};

void run_forward(const KernelTable& kernels, const Problem& problem, const Operands& operands,
                 const ExecutionContext& context);
void run_dx(const KernelTable& kernels, DxPath path, const Problem& problem,
            const Operands& operands, const ExecutionContext& context);
/// `stream`: write past the caches.
void run_dw(const KernelTable& kernels, bool stream, const Problem& problem,
            const Operands& operands, const ExecutionContext& context);

inline const DTypeKernels& kernels_for(const KernelTable& kernels, DType dtype) {
  return *std::ranges::find(kernels.formats, dtype, &DTypeKernels::dtype);
}

}  // namespace moegemm::cpu::simd
