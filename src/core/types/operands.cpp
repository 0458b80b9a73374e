#include "core/backend.h"
#include "core/refusal.h"

namespace moegemm {

Problem low_rank_part(const Problem& problem) {
  Problem part = problem;
  (problem.op == Op::kForward ? part.k : part.n) = problem.low_rank;
  part.low_rank = 0;
  part.quantization = {};
  return part;
}

std::string refuse_weights(const Problem& problem, const KernelInfo& kernel) {
  if (kernel.weights != problem.quantization.format) {
    return kernel.weights == WeightFormat::kPlain
               ? join("decodes no quantised W, this one is ", to_string(problem.quantization))
               : join("decodes W from ", to_string(kernel.weights), ", this one is ",
                      to_string(problem.quantization));
  }
  if (problem.ups_apart && !kernel.ups_apart) return "reads gates and ups from one tensor";
  if (problem.ups_apart && !problem.ups_follow) {
    return "reads ups that lie after their gates, by less than 1 TiB and a multiple of 16 bytes";
  }
  if (kernel.own_order && problem.batch_invariant) {
    return "sums in an order of its own, and results are to be batch invariant";
  }
  return {};
}

Operands Operands::low_rank_part() const {
  Operands part = *this;
  part.x = part.dy = low_rows;
  part.x_stride = part.dy_stride = low_rows_stride;
  part.w = low_weights;
  part.w_scales = nullptr;
  part.w_stride = low_weights_stride;
  part.low_rows = part.low_weights = nullptr;
  return part;
}

}  // namespace moegemm
