#include <algorithm>
#include <bit>
#include <limits>

#include "core/refusal.h"
#include "core/validation/quantization_rules.h"
#include "core/validation/tensor_rules.h"
#include "core/validation/validate.h"
#include "moegemm/execution.h"

namespace moegemm {
namespace {

bool spans_beyond_64_gib(const Problem& problem, const Operands& operands) {
  constexpr double kMost = 64.0 * (1 << 30);
  const std::int64_t stride = problem.gathers_x() ? operands.x_stride : operands.dy_stride;
  const std::int64_t rows = problem.flat_rows() / problem.gather_divisor();
  return static_cast<double>(rows) * static_cast<double>(stride) *
             static_cast<double>(size_bytes(problem.dtype)) >
         kMost;
}

bool lies_far_apart(const TensorView& rows) {
  const std::int64_t bytes = rows.row_stride * size_bytes(rows.dtype);
  const int unit = std::countr_zero(static_cast<std::uint64_t>(bytes) | 16);
  return bytes >> unit > std::numeric_limits<std::uint32_t>::max();
}

/// Whether the ups lie after the gates as far as the stride of a tensor map reaches.
bool follow(const void* gates, const void* ups) {
  constexpr std::uintptr_t kMost = std::uintptr_t{1} << 40;
  const auto first = reinterpret_cast<std::uintptr_t>(gates);
  const auto second = reinterpret_cast<std::uintptr_t>(ups);
  return second > first && second - first < kMost && (second - first) % 16 == 0;
}

void point_at(const TensorView& view, const void*& data, std::int64_t& stride) {
  data = view.data;
  stride = view.row_stride;
}

/// W's memory holds packed values, not what its view says.
void place_quantized(const Argument& w, const ScalesArgument& scales, const Argument& out,
                     Call& call) {
  Problem& problem = call.problem;
  require_packed_memory(w, scales, problem.quantization, problem.n, problem.k, out);
  call.operands.w_stride = problem.k;
  call.operands.w_scales = scales.view.data;
  problem.packed_alignment = packed_alignment(w.view, problem.quantization);
  problem.scales_alignment =
      scales_alignment(scales.view, problem.quantization, problem.n, problem.k);
}

/// Products walk both with the stride of W.
void place_ups(const Argument& up, const Argument& w, const Argument& out, Call& call) {
  Problem& problem = call.problem;
  require_memory(up);
  if (up.view.row_stride != w.view.row_stride) {
    refuse_value(up.name, " has row_stride ", up.view.row_stride, "; it must be that of ", w.name,
                 ", ", w.view.row_stride);
  }
  require_disjoint(out, up);
  problem.input_alignment = std::min(problem.input_alignment, alignment_bytes(up.view));
  call.operands.w_up = up.view.data;
  problem.ups_follow = follow(call.operands.w, call.operands.w_up);
}

void place_low_rank(const GemmOptions& options, const Argument& out, Call& call) {
  Problem& problem = call.problem;
  Operands& operands = call.operands;
  const Argument rows{"low_rank_rows", options.low_rank_rows};
  const Argument weights{"low_rank_weights", options.low_rank_weights};
  for (const Argument* argument : {&rows, &weights}) {
    require_memory(*argument);
    require_disjoint(out, *argument);
    problem.input_alignment = std::min(problem.input_alignment, alignment_bytes(argument->view));
  }
  point_at(rows.view, operands.low_rows, operands.low_rows_stride);
  point_at(weights.view, operands.low_weights, operands.low_weights_stride);
}

}  // namespace

Call place(const Description& description, const TensorView& first_view,
           const TensorView& second_view, const TensorView& out_view, const RoutingView& routing,
           const GemmOptions& options) {
  const CallerWords& words = description.words;
  Call call{description.problem, {}};
  Problem& problem = call.problem;
  Operands& operands = call.operands;
  const bool forward = problem.op == Op::kForward;
  const bool gradient = problem.op == Op::kDw;
  const Argument first{forward ? words.x : words.dy, first_view};
  const Argument second{gradient ? words.x : words.w, second_view};
  const Argument m_sizes{"m_sizes", routing.m_sizes};
  const Argument out{output_name(problem.op, words), out_view};
  const Argument starts{"starts", routing.starts};
  const Argument* const inputs[] = {&first, &second, &m_sizes, &starts};
  for (const Argument* input : inputs) require_memory(*input);
  require_memory(out);
  const bool packed = !problem.quantization.plain();
  for (const Argument* input : inputs) {
    if (!packed || input != &second) require_disjoint(out, *input);
  }

  forward ? point_at(first_view, operands.x, operands.x_stride)
          : point_at(first_view, operands.dy, operands.dy_stride);
  gradient ? point_at(second_view, operands.x, operands.x_stride)
           : point_at(second_view, operands.w, operands.w_stride);
  operands.out = out_view.data;
  operands.out_stride = out_view.row_stride;
  operands.m_sizes = m_sizes.view.data;
  operands.starts = starts.view.data;
  problem.out_dtype = out_view.dtype;
  problem.input_alignment = std::min(alignment_bytes(first_view), alignment_bytes(second_view));
  problem.output_alignment = alignment_bytes(out_view);
  if (packed) {
    problem.input_alignment = alignment_bytes(first_view);
    place_quantized(second, {words.w_scales, options.w_scales}, out, call);
  }
  if (gradient) {
    const bool in_place_of_dy = problem.weight_layout == WeightLayout::kNk;
    problem.dy_alignment = alignment_bytes(in_place_of_dy ? first_view : second_view);
  }
  if (problem.permutation != Permutation::kNone) {
    const Argument indices{"gather_indices", routing.gather_indices};
    require_memory(indices);
    require_disjoint(out, indices);
    operands.gather_indices = indices.view.data;
  }
  if (problem.multiply) {
    const Argument weights{words.router_weights, routing.router_weights};
    require_memory(weights);
    require_dense(weights);
    require_disjoint(out, weights);
    operands.router_weights = weights.view.data;
  }
  if (problem.bias) {
    const Argument bias{"bias", options.bias};
    require_memory(bias);
    require_disjoint(out, bias);
    point_at(bias.view, operands.bias, operands.bias_stride);
  }
  if (problem.ups_apart) place_ups({words.w_up, options.w_up}, second, out, call);
  if (problem.low_rank > 0) place_low_rank(options, out, call);
  problem.batch_invariant = is_batch_invariant();
  problem.far_rows = problem.gathers() && spans_beyond_64_gib(problem, operands);
  problem.far_apart = lies_far_apart(first_view) || (gradient && lies_far_apart(second_view));
  return call;
}

void take_context(Problem& problem, const GemmOptions& options, const ExecutionContext& context) {
  problem.max_multiprocessors = std::max(context.max_multiprocessors, 0);
  // dW has no weights to begin with, and timed launches follow others than the promise is about.
  problem.rows_pending =
      context.ahead == LaunchAhead::kWritesRows && problem.op != Op::kDw && !options.autotune;
}

}  // namespace moegemm
