#include "moegemm/describe.h"

#include "core/refusal.h"
#include "core/validation/quantization_rules.h"
#include "core/validation/tensor_rules.h"
#include "core/validation/validate.h"

namespace moegemm {
namespace {

/// Fills in a Problem while checking the tensors it comes from. The first operand of the call
/// leads: the others follow its dtype and device.
class Describer {
 public:
  Describer(Op op, const TensorView& first, const TensorView& second, const RoutingView& routing,
            const GemmOptions& options, const TensorView& out, const CallerWords& words)
      : lead_{op == Op::kForward ? words.x : words.dy, first},
        second_{op == Op::kDw ? words.x : words.w, second},
        routing_(routing),
        indices_{"gather_indices", routing.gather_indices},
        weights_{words.router_weights, routing.router_weights},
        bias_{"bias", options.bias},
        scales_{words.w_scales, options.w_scales},
        up_{words.w_up, options.w_up},
        low_rows_{"low_rank_rows", options.low_rank_rows},
        low_weights_{"low_rank_weights", options.low_rank_weights},
        out_{output_name(op, words), out},
        options_(options),
        words_(words) {
    problem_.op = op;
    problem_.topk = routing.topk;
  }

  Description describe() {
    take_options();
    check_lead();
    require_form(second_, second_forms());
    require_same_dtype(second_, lead_);
    require_same_device(second_, lead_);
    problem_.experts = require_segments(routing_, lead_);
    problem_.sizes_dtype = routing_.m_sizes.dtype;
    count_rows();
    problem_.op == Op::kDw ? measure_gradient() : measure_weights();
    check_router_weights();
    take_output_dtype();
    validate(problem_, words_);
    if (problem_.bias) {
      require_like(bias_, lead_, {problem_.experts, problem_.features()}, "[E, columns]");
    }
    if (problem_.ups_apart) check_up();
    if (problem_.low_rank > 0) check_low_rank();
    if (!problem_.quantization.plain()) {
      require_scales(scales_, problem_.quantization, problem_.experts, problem_.n, problem_.k,
                     problem_.device);
    }
    Description description{problem_, 0, {}, words_};
    shape_output(description);
    if (options_.config) validate(*options_.config, problem_, words_);
    return description;
  }

 private:
  /// The rules that need no shape come first: they decide which tensors are looked at.
  void take_options() {
    if (options_.permute_x && options_.permute_y) {
      refuse_value("permute_x=", words_.yes, " and permute_y=", words_.yes,
                   "; at most one of them is accepted");
    }
    problem_.weight_layout = options_.weight_layout;
    if (options_.permute_x) problem_.permutation = Permutation::kX;
    if (options_.permute_y) problem_.permutation = Permutation::kY;
    problem_.segments = routing_.segments();
    problem_.tails = routing_.tails;
    problem_.expected_rows = routing_.expected_rows;
    problem_.multiply = options_.multiply;
    problem_.accumulate = options_.accumulate;
    problem_.dy_per_token = options_.dy_per_token;
    problem_.allow_tf32 = options_.allow_tf32;
    problem_.bias = options_.bias.given();
    problem_.activation = options_.activation;
    problem_.quantization = options_.quantization;
    if (!problem_.quantization.plain()) {
      require_given(scales_, problem_.quantization, words_.none);
    } else if (scales_.view.given()) {
      refuse_value(scales_.name, " is ", to_string(scales_.view),
                   "; only a quantised W has scales, and no format is given");
    }
    problem_.ups_apart = up_.view.given();
    if (problem_.ups_apart && options_.autotune) {
      refuse_value(up_.name, " is given with autotune=", words_.yes,
                   "; two tensors of weights are not measured");
    }
    take_low_rank();
    validate_flags(problem_, words_);
    if (problem_.permutation != Permutation::kNone && !indices_.view.given()) {
      refuse_value("gather_indices is ", words_.none, "; ", to_string(problem_.permutation), "=",
                   words_.yes, " needs it");
    }
    if (problem_.multiply && !weights_.view.given()) {
      refuse_value(weights_.name, " is ", words_.none, "; ", words_.multiply, "=", words_.yes,
                   " needs it");
    }
  }

  void take_low_rank() {
    if (!low_rows_.view.given() && !low_weights_.view.given()) return;
    for (const Argument* argument : {&low_rows_, &low_weights_}) {
      if (argument->view.given()) continue;
      refuse_value(argument->name, " is ", words_.none,
                   "; a low-rank part is low_rank_rows and low_rank_weights");
    }
    require_form(low_rows_, {{2, "[M, r]"}});
    problem_.low_rank = low_rows_.view.shape[1];
    require_extent(low_rows_, problem_.low_rank, "r");
  }

  void check_up() {
    const TensorView& w = second_.view;
    require_same_dtype(up_, lead_);
    require_same_device(up_, lead_);
    if (up_.view.rank != w.rank || up_.view.shape != w.shape) {
      refuse_value(up_.name, " is ", to_string(up_.view), "; it must be as ", second_.name, ", ",
                   to_string(w));
    }
  }

  void check_low_rank() {
    for (const Argument* argument : {&low_rows_, &low_weights_}) {
      require_same_dtype(*argument, lead_);
      require_same_device(*argument, lead_);
    }
    require_shape(low_rows_, {problem_.rows, problem_.low_rank}, "[M, r]");
    const std::int64_t features = problem_.features();
    const bool rank_last =
        (problem_.op == Op::kForward) == (problem_.weight_layout == WeightLayout::kNk);
    const char* letters = problem_.op == Op::kForward ? (rank_last ? "[E, N, r]" : "[E, r, N]")
                                                      : (rank_last ? "[E, K, r]" : "[E, r, K]");
    require_form(low_weights_, {{3, letters}});
    if (rank_last) {
      require_shape(low_weights_, {problem_.experts, features, problem_.low_rank}, letters);
    } else {
      require_shape(low_weights_, {problem_.experts, problem_.low_rank, features}, letters);
    }
  }

  void check_lead() {
    const bool is_x = problem_.op == Op::kForward;
    require_form(lead_, {{2, is_x ? "[T, K] or [M, K]" : "[M, N] or [T, N]"}});
    require_floating(lead_);
    problem_.dtype = problem_.out_dtype = lead_.view.dtype;
    problem_.device = lead_.view.device;
  }

  std::initializer_list<Form> second_forms() const {
    static constexpr std::initializer_list<Form> kNk = {{3, "[E, N, K]"}, {2, "[E * N, K]"}};
    static constexpr std::initializer_list<Form> kKn = {{3, "[E, K, N]"}, {2, "[E * K, N]"}};
    static constexpr std::initializer_list<Form> kX = {{2, "[T, K] or [M, K]"}};
    if (problem_.op == Op::kDw) return kX;
    return problem_.weight_layout == WeightLayout::kNk ? kNk : kKn;
  }

  /// M: the rows of the first operand, except that one row per token serves topk of them. The
  /// indices then count: T * topk of them, or a capacity.
  void count_rows() {
    const bool per_token =
        problem_.op == Op::kForward ? problem_.gathers_x() : problem_.dy_per_token;
    problem_.rows = lead_.view.shape[0];
    if (problem_.permutation != Permutation::kNone) {
      require_indices(indices_, lead_);
      problem_.index_dtype = indices_.view.dtype;
      const std::int64_t length = indices_.view.shape[0];
      if (per_token) {
        problem_.rows = length;
      } else if (length != problem_.rows) {
        refuse_value("gather_indices is ", to_string(indices_.view),
                     "; its shape must be [M] with M = ", problem_.rows, ", the rows of ",
                     lead_.name);
      }
    }
    if (per_token) count_slots(lead_, problem_.topk);
    if (problem_.scatters() && out_.view.given()) {
      require_form(out_, {{2, problem_.op == Op::kForward ? "[T * topk, N]" : "[T * topk, K]"}});
      const std::int64_t slots = out_.view.shape[0];
      if (slots != problem_.rows && slots % problem_.topk != 0) {
        refuse_value(out_.name, " is ", to_string(out_.view), "; with ",
                     to_string(problem_.permutation),
                     " it must have T * topk rows, topk = ", problem_.topk);
      }
      count_slots(out_, 1);
    }
    if (problem_.op != Op::kDw) return;
    if (problem_.gathers_x()) {
      count_slots(second_, problem_.topk);
    } else if (second_.view.shape[0] != problem_.rows) {
      refuse_value(second_.name, " is ", to_string(second_.view),
                   "; without permute_x it must have M = ", problem_.rows, " rows");
    }
  }

  /// Indices name so many flat rows, `each` for every row of the argument.
  void count_slots(const Argument& argument, std::int64_t each) {
    const std::int64_t slots = checked_product(argument.view.shape[0], each, "T * topk");
    if (slots != problem_.rows) problem_.slots = slots;
  }

  void measure_gradient() {
    problem_.n = lead_.view.shape[1];
    problem_.k = second_.view.shape[1];
    require_extent(lead_, problem_.n, "N");
    require_extent(second_, problem_.k, "K");
  }

  /// N and K of W, which may be flattened, against the columns of X or dY.
  void measure_weights() {
    const TensorView& w = second_.view;
    std::int64_t rows = w.shape[1];
    if (w.rank == 2) {
      if (w.shape[0] % problem_.experts != 0) {
        refuse_value(
            second_.name, " is ", to_string(w), "; a flattened ", second_forms().end()[-1].letters,
            " needs a multiple of E = ", problem_.experts, " rows, E being the length of m_sizes");
      }
      rows = w.shape[0] / problem_.experts;
    } else if (w.shape[0] != problem_.experts) {
      refuse_value(second_.name, " is ", to_string(w),
                   "; it must have one matrix for each of the E = ", problem_.experts,
                   " entries of m_sizes");
    }
    const std::int64_t columns = w.shape[w.rank - 1];
    const bool stored_nk = problem_.weight_layout == WeightLayout::kNk;
    problem_.n = (stored_nk ? rows : columns) * (problem_.ups_apart ? 2 : 1);
    problem_.k = stored_nk ? columns : rows;
    require_extent(second_, problem_.n, "N");
    require_extent(second_, problem_.k, "K");
    const bool forward = problem_.op == Op::kForward;
    const std::int64_t depth = forward ? problem_.k : problem_.n;
    if (lead_.view.shape[1] != depth) {
      refuse_value(lead_.name, " is ", to_string(lead_.view), "; its last dimension must be ",
                   forward ? "K" : "N", " = ", depth, " as in ", second_.name, " (", to_string(w),
                   ") with E = ", problem_.experts);
    }
  }

  void check_router_weights() {
    if (!problem_.multiply) return;
    require_router_weights(weights_, lead_, problem_.flat_rows(), problem_.topk);
    problem_.weights_dtype = weights_.view.dtype;
  }

  void take_output_dtype() {
    if (!out_.view.given()) {
      if (!problem_.accumulate) return;
      refuse_value("accumulate=", words_.yes, " with ", out_.name, "=", words_.none,
                   "; it must hold the fp32 tensor to add to");
    }
    require_dtype_or_float32(out_, lead_);
    require_same_device(out_, lead_);
    problem_.out_dtype = out_.view.dtype;
    if (problem_.accumulate) require_accumulable(out_, words_);
  }

  void shape_output(Description& description) const {
    const Problem& problem = description.problem;
    const bool stored_nk = problem.weight_layout == WeightLayout::kNk;
    const char* letters = problem.op == Op::kForward ? "[M, N]" : "[M, K]";
    description.out_rank = 2;
    if (problem.op == Op::kDw) {
      description.out_rank = 3;
      description.out_shape = {problem.experts, stored_nk ? problem.n : problem.k,
                               stored_nk ? problem.k : problem.n};
      letters = to_string(problem.weight_layout);
    } else {
      description.out_shape = {problem.output_rows(), problem.output_columns()};
      if (problem.activation) letters = "[M, activated columns]";
    }
    if (!out_.view.given()) return;
    const auto [a, b, c] = description.out_shape;
    if (problem.op != Op::kDw) {
      require_shape(out_, {a, b}, letters);
    } else if (out_.view.rank == 2) {
      require_shape(out_, {a * b, c}, stored_nk ? "[E * N, K]" : "[E * K, N]");
    } else {
      require_shape(out_, {a, b, c}, letters);
    }
  }

  const Argument lead_;
  const Argument second_;
  const RoutingView& routing_;
  const Argument indices_;
  const Argument weights_;
  const Argument bias_;
  const ScalesArgument scales_;
  const Argument up_;
  const Argument low_rows_;
  const Argument low_weights_;
  const Argument out_;
  const GemmOptions& options_;
  const CallerWords& words_;
  Problem problem_;
};

}  // namespace

Description describe(Op op, const TensorView& first, const TensorView& second,
                     const RoutingView& routing, const GemmOptions& options, const TensorView& out,
                     const CallerWords& words) {
  return Describer(op, first, second, routing, options, out, words).describe();
}

Description described(Op op, const TensorView& first, const TensorView& second,
                      const TensorView& out, const RoutingView& routing,
                      const GemmOptions& options) {
  if (!out.given()) refuse_value(output_name(op, {}), " is not given, but this call needs it");
  return describe(op, first, second, routing, options, out);
}

}  // namespace moegemm
