#include "core/planning/stored_form.h"

#include <utility>

#include "moegemm/execution.h"

namespace moegemm {
namespace {

Op with_w_transposed(Op op) {
  return op == Op::kForward ? Op::kDx : op == Op::kDx ? Op::kForward : Op::kDw;
}

Permutation with_x_and_y_swapped(Permutation permutation) {
  return permutation == Permutation::kX   ? Permutation::kY
         : permutation == Permutation::kY ? Permutation::kX
                                          : Permutation::kNone;
}

}  // namespace

Problem in_stored_form(const Problem& problem) {
  if (problem.weight_layout == WeightLayout::kNk) return problem;
  Problem stored = problem;
  const bool per_token = problem.gathers_x() || problem.dy_per_token;
  stored.weight_layout = WeightLayout::kNk;
  stored.op = with_w_transposed(problem.op);
  stored.permutation = with_x_and_y_swapped(problem.permutation);
  std::swap(stored.n, stored.k);
  stored.dy_per_token = stored.gathers_dy() && per_token;
  // A gathered X has one row per token: where there is one per slot, each is a token of its own.
  if (stored.gathers_x() && !per_token) stored.topk = 1;
  return stored;
}

Call in_stored_form(Call call) {
  if (call.problem.weight_layout == WeightLayout::kNk) return call;
  call.problem = in_stored_form(call.problem);
  std::swap(call.operands.x, call.operands.dy);
  std::swap(call.operands.x_stride, call.operands.dy_stride);
  return call;
}

Problem asked_by_hand(const Problem& written, const std::optional<KernelConfig>& config) {
  validate(written);
  if (config) validate(*config, written);
  Problem asked = in_stored_form(written);
  asked.batch_invariant = asked.batch_invariant && is_batch_invariant();
  return asked;
}

}  // namespace moegemm
