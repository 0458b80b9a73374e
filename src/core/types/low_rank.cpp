#include "core/backend.h"

namespace moegemm {

Problem low_rank_part(const Problem& problem) {
  Problem part = problem;
  (problem.op == Op::kForward ? part.k : part.n) = problem.low_rank;
  part.low_rank = 0;
  return part;
}

Operands Operands::low_rank_part() const {
  Operands part = *this;
  part.x = part.dy = low_rows;
  part.x_stride = part.dy_stride = low_rows_stride;
  part.w = low_weights;
  part.w_stride = low_weights_stride;
  part.low_rows = part.low_weights = nullptr;
  return part;
}

}  // namespace moegemm
