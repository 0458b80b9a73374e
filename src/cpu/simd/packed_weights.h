#pragma once

#include "core/backend.h"
#include "cpu/simd/kernel_table.h"

namespace moegemm::cpu::simd {

/// The quantised W of an expert as the kernels of `dtype` take it. `values` and `scales` are those
/// of all experts, each a W_e of [n, k].
PackedWeights packed_weights(const Quantization& quantization, DType dtype, const void* values,
                             const void* scales, std::int64_t expert, std::int64_t n,
                             std::int64_t k);

/// The same of a call.
inline PackedWeights packed_weights(const Problem& problem, const Operands& operands,
                                    std::int64_t expert) {
  return packed_weights(problem.quantization, problem.dtype, operands.w, operands.w_scales, expert,
                        problem.n, problem.k);
}

}  // namespace moegemm::cpu::simd
