#pragma once

#include "core/backend.h"
#include "cpu/simd/kernel_table.h"
#include "cpu/simd/work_list.h"

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

/// The weights of a task: `plain` as they lie, or quantised ones, which `packed` then describes,
/// and scratch that they are decoded into.
inline WeightBlock weight_block(const Problem& problem, const Operands& operands,
                                const Block& block, const void* plain, PackedWeights& packed,
                                void* decoded) {
  if (problem.quantization.plain()) return {.w = plain, .w_stride = operands.w_stride};
  packed = packed_weights(problem, operands, block.expert);
  return {.w_stride = operands.w_stride,
          .packed_w = &packed,
          .packed_first = block.first_col,
          .decoded = decoded};
}

}  // namespace moegemm::cpu::simd
