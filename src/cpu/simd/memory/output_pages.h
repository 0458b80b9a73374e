#pragma once

#include <cstdint>
#include <span>

#include "core/backend.h"

namespace moegemm::cpu::simd {

/// Where an output lies: rows of `row_bytes`, each `pitch_bytes` after the one before. What is
/// between two rows belongs to somebody else.
struct OutputSpan {
  void* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t row_bytes = 0;
  std::int64_t pitch_bytes = 0;

  /// From the first byte of the first row to the last byte of the last one.
  std::int64_t bytes() const { return rows > 0 ? (rows - 1) * pitch_bytes + row_bytes : 0; }
};

inline OutputSpan output_span(const Problem& problem, const Operands& operands) {
  const std::int64_t element = size_bytes(problem.out_dtype);
  return {operands.out, problem.op == Op::kDw ? problem.experts * problem.n : problem.output_rows(),
          problem.output_columns() * element, operands.out_stride * element};
}

/// Puts pages under a large output that is about to be written for the first time: the first touch
/// of a fresh 42 MiB buffer takes 22 ms in 4 KiB pages and 5 ms in 2 MiB ones, often more than the
/// arithmetic. So 2 MiB pages, unless the last ones took longer than small ones do.
/// Every worker touches pages of its own: two that meet in a fresh page would both clear 2 MiB, and
/// one of them in vain. Only whole huge pages inside the span are concerned, and only bytes of rows
/// are touched; no byte changes, and advice that the system does not take changes nothing. Several
/// outputs take one turn of the workers.
void prepare_output_pages(std::span<const OutputSpan> outputs, const ExecutionContext& context);
inline void prepare_output_pages(const OutputSpan& out, const ExecutionContext& context) {
  prepare_output_pages({&out, 1}, context);
}

}  // namespace moegemm::cpu::simd
