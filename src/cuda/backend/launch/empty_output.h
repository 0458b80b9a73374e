#pragma once

#include <cuda_runtime_api.h>

#include "core/backend.h"
#include "cuda/backend/error.h"

namespace moegemm::cuda {

/// The output of a row GEMM without rows: in flat order it has rows all the same, and no index
/// names them.
inline void zero_unnamed_output(const Problem& problem, const Operands& operands,
                                cudaStream_t stream) {
  if (problem.output_rows() == 0 || problem.tails == Tails::kUndefined) return;
  const auto element = static_cast<std::size_t>(size_bytes(problem.out_dtype));
  check(cudaMemset2DAsync(operands.out, static_cast<std::size_t>(operands.out_stride) * element, 0,
                          static_cast<std::size_t>(problem.output_columns()) * element,
                          static_cast<std::size_t>(problem.output_rows()), stream),
        "set a product without rows to zero");
}

/// dW of no rows anywhere: a tensor map cannot describe an empty input.
inline void zero_weight_gradient(const Problem& problem, const Operands& operands,
                                 cudaStream_t stream) {
  if (problem.accumulate) return;
  const auto element = static_cast<std::size_t>(size_bytes(problem.out_dtype));
  check(cudaMemset2DAsync(operands.out, static_cast<std::size_t>(operands.out_stride) * element, 0,
                          static_cast<std::size_t>(problem.k) * element,
                          static_cast<std::size_t>(problem.experts * problem.n), stream),
        "set dW to zero");
}

}  // namespace moegemm::cuda
