#include "core/validation/validate.h"

#include <algorithm>

#include "core/refusal.h"
#include "core/types/names.h"
#include "core/validation/tensor_rules.h"

namespace moegemm {
namespace {

void require_at_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value < least) refuse_value(name, " is ", value, "; it must be at least ", least);
}

/// The rules that need no shape, first: they decide which tensors are looked at.
void validate_flags(const Problem& problem) {
  require_topk(problem.topk);
  if (problem.multiply && problem.permutation != Permutation::kY) {
    refuse_value("fuse_mul is true with permute_y false; fuse_mul needs permute_y");
  }
  if (problem.accumulate && problem.op != Op::kDw) {
    refuse_value("accumulate is true for ", to_string(problem.op), "; only dW accumulates");
  }
  if (problem.dy_per_token && !problem.gathers_dy()) {
    refuse_value("dy_per_token is true for ", to_string(problem.op), " with ",
                 to_string(problem.permutation), "; only dX and dW with permute_y gather dy");
  }
  if (problem.presorted && (problem.op != Op::kDw || problem.permutation == Permutation::kNone)) {
    refuse_value("presorted is true for ", to_string(problem.op), " with ",
                 to_string(problem.permutation), "; only dW has an operand to copy into order");
  }
  if (problem.bias && problem.op == Op::kDw) {
    refuse_value("bias is given for dW; only forward and dX add one");
  }
  if (problem.activation && problem.multiply) {
    refuse_value("activation is given with fuse_mul; a row is weighted behind the second product");
  }
  if (problem.activation && (problem.op == Op::kDw || problem.scatters())) {
    refuse_value("activation is given for ", to_string(problem.op), " with ",
                 to_string(problem.permutation),
                 "; only forward and dX in expert order are activated");
  }
}

/// Rows per expert of W or dW, which may be flattened to [E * N, K].
std::int64_t rows_per_expert(const Argument& weights, std::int64_t experts) {
  const TensorView& view = weights.view;
  if (view.rank == 3) {
    if (view.shape[0] != experts) {
      refuse_value(weights.name, " is ", to_string(view), "; its shape[0] must be E = ", experts,
                   ", the length of m_sizes");
    }
    return view.shape[1];
  }
  if (view.shape[0] % experts != 0) {
    refuse_value(weights.name, " has ", view.shape[0],
                 " rows; a flattened [E * N, K] needs a multiple of E = ", experts,
                 ", the length of m_sizes");
  }
  return view.shape[0] / experts;
}

void require_weights_shape(const Argument& weights, const Problem& problem) {
  if (weights.view.rank == 3) {
    require_shape(weights, {problem.experts, problem.n, problem.k}, "[E, N, K]");
  } else {
    require_shape(weights, {checked_product(problem.experts, problem.n, "E * N"), problem.k},
                  "[E * N, K]");
  }
}

/// Y or dX; `meaning` is its shape without an activation.
void require_output_shape(const Argument& output, const Problem& problem, const char* meaning) {
  if (problem.activation) {
    require_activation(*problem.activation, "the product", problem.features());
    meaning = "[M, activated columns]";
  }
  require_shape(output, {problem.output_rows(), problem.output_columns()}, meaning);
}

/// Fills in a Problem while checking the tensors it comes from. The first operand of the call
/// leads: the others follow its dtype and device.
class Describer {
 public:
  Describer(Op op, const Argument& lead, const RoutingView& routing, const GemmOptions& options)
      : lead_(lead), routing_(routing) {
    if (options.permute_x && options.permute_y) {
      refuse_value("permute_x and permute_y are both true; at most one of them may be");
    }
    problem.op = op;
    problem.topk = routing.topk;
    if (options.permute_x) problem.permutation = Permutation::kX;
    if (options.permute_y) problem.permutation = Permutation::kY;
    problem.multiply = options.fuse_mul;
    problem.accumulate = options.accumulate;
    problem.dy_per_token = options.dy_per_token;
    problem.allow_tf32 = options.allow_tf32;
    problem.bias = options.bias.given();
    problem.activation = options.activation;
    validate_flags(problem);

    require_tensor(lead, {2});
    require_floating(lead);
    problem.dtype = lead.view.dtype;
    problem.device = lead.view.device;
    problem.input_alignment = alignment_bytes(lead.view);
    if (op == Op::kDw) problem.dy_alignment = problem.input_alignment;

    const Argument m_sizes{"m_sizes", routing.m_sizes};
    require_tensor(m_sizes, {1});
    require_index(m_sizes);
    require_same_device(m_sizes, lead);
    require_at_least("E, the length of m_sizes,", m_sizes.view.shape[0], 1);
    problem.experts = m_sizes.view.shape[0];
    problem.sizes_dtype = m_sizes.view.dtype;
    operands.m_sizes = m_sizes.view.data;
  }

  void add_input(const Argument& input, std::initializer_list<int> ranks) {
    require_tensor(input, ranks);
    require_same_dtype(input, lead_);
    require_same_device(input, lead_);
    problem.input_alignment = std::min(problem.input_alignment, alignment_bytes(input.view));
  }

  void add_output(const Argument& output, std::initializer_list<int> ranks) {
    require_tensor(output, ranks);
    require_dtype_or_float32(output, lead_);
    require_same_device(output, lead_);
    if (problem.accumulate && output.view.dtype != DType::kFloat32) {
      refuse_type(output.name, " has dtype ", to_string(output.view.dtype),
                  "; accumulate needs an fp32 output");
    }
    problem.out_dtype = output.view.dtype;
    problem.output_alignment = alignment_bytes(output.view);
    operands.out = output.view.data;
    operands.out_stride = output.view.row_stride;
  }

  /// Indices and weights, as far as this problem reads them. Afterwards problem.rows stands.
  void add_routing(std::int64_t rows) {
    problem.rows = rows;
    if (problem.permutation != Permutation::kNone) {
      const Argument indices = gather_indices();
      require_shape(indices, {rows}, "[M]");
      problem.index_dtype = indices.view.dtype;
      operands.gather_indices = indices.view.data;
    }
    if (problem.multiply) {
      const Argument weights{"topk_weights", routing_.topk_weights};
      if (!weights.view.given()) refuse_value("topk_weights is not given; fuse_mul needs it");
      require_row_weights(weights, lead_, problem.flat_rows(), problem.topk);
      problem.weights_dtype = weights.view.dtype;
      operands.topk_weights = weights.view.data;
    }
  }

  Argument gather_indices() const {
    const Argument indices{"gather_indices", routing_.gather_indices};
    if (!indices.view.given()) {
      refuse_value("gather_indices is not given; ", to_string(problem.permutation), " needs it");
    }
    require_tensor(indices, {1});
    require_index(indices);
    require_same_device(indices, lead_);
    return indices;
  }

  /// X holds one row per token with permute_x, else one per routed row.
  void require_x_rows(const Argument& x, std::int64_t rows) {
    const std::int64_t found = x.view.shape[0];
    if (problem.gathers_x()) {
      count_slots(checked_product(found, problem.topk, "T * topk"), rows);
    } else if (found != rows) {
      refuse_value(x.name, " has ", found, " rows; without permute_x it must have M = ", rows);
    }
  }

  /// Indices may name so many flat rows; `rows` are a capacity if it is another number.
  void count_slots(std::int64_t slots, std::int64_t rows) {
    if (slots != rows) problem.slots = slots;
  }

  /// The rows of a dX in flat order are its caller's to say: those of whole tokens.
  void take_scattered_rows(const Argument& output, std::int64_t rows) {
    if (problem.permutation != Permutation::kX) return;
    const std::int64_t found = output.view.shape[0];
    if (found % problem.topk != 0) {
      refuse_value(output.name, " has ", found,
                   " rows; with permute_x it must have T * topk, topk = ", problem.topk);
    }
    count_slots(found, rows);
  }

  /// M: the rows of dY, except that one row per token serves topk of them. The indices then count.
  std::int64_t rows_of_dy(const Argument& dy) {
    const std::int64_t found = dy.view.shape[0];
    if (!problem.dy_per_token) return found;
    const std::int64_t rows = gather_indices().view.shape[0];
    count_slots(checked_product(found, problem.topk, "T * topk"), rows);
    return rows;
  }

  Call finish(const Argument& input, const Argument& output, const GemmOptions& options) {
    problem.far_rows = problem.gathers() && spans_beyond_64_gib();
    validate(problem);
    if (problem.bias) add_bias({"bias", options.bias}, output);
    if (options.config) validate(*options.config, problem);
    require_disjoint(output, lead_);
    require_disjoint(output, input);
    require_disjoint(output, {"m_sizes", routing_.m_sizes});
    if (problem.permutation != Permutation::kNone) {
      require_disjoint(output, {"gather_indices", routing_.gather_indices});
    }
    if (problem.multiply) require_disjoint(output, {"topk_weights", routing_.topk_weights});
    return {problem, operands};
  }

  Problem problem;
  Operands operands;

 private:
  bool spans_beyond_64_gib() const {
    constexpr double kMost = 64.0 * (1 << 30);
    const std::int64_t stride = problem.gathers_x() ? operands.x_stride : operands.dy_stride;
    const std::int64_t rows = problem.flat_rows() / problem.gather_divisor();
    return static_cast<double>(rows) * static_cast<double>(stride) *
               static_cast<double>(size_bytes(problem.dtype)) >
           kMost;
  }

  void add_bias(const Argument& bias, const Argument& output) {
    require_tensor(bias, {2});
    require_same_dtype(bias, lead_);
    require_same_device(bias, lead_);
    require_shape(bias, {problem.experts, problem.features()}, "[E, columns]");
    require_disjoint(output, bias);
    operands.bias = bias.view.data;
    operands.bias_stride = bias.view.row_stride;
  }

  Argument lead_;
  const RoutingView& routing_;
};

}  // namespace

Call describe_forward(const TensorView& x_view, const TensorView& w_view, const TensorView& y_view,
                      const RoutingView& routing, const GemmOptions& options) {
  const Argument x{"x", x_view};
  const Argument w{"w", w_view};
  const Argument y{"y", y_view};
  Describer call(Op::kForward, x, routing, options);
  call.add_input(w, {3, 2});
  call.add_output(y, {2});
  // With permute_x the indices say how many rows there are: T * topk, or a capacity.
  const std::int64_t rows =
      call.problem.gathers_x() ? call.gather_indices().view.shape[0] : x_view.shape[0];
  call.require_x_rows(x, rows);
  call.add_routing(rows);
  call.problem.n = rows_per_expert(w, call.problem.experts);
  call.problem.k = x_view.shape[1];
  require_weights_shape(w, call.problem);
  require_output_shape(y, call.problem, "[M, N]");
  call.operands.x = x_view.data;
  call.operands.x_stride = x_view.row_stride;
  call.operands.w = w_view.data;
  call.operands.w_stride = w_view.row_stride;
  return call.finish(w, y, options);
}

Call describe_dx(const TensorView& dy_view, const TensorView& w_view, const TensorView& dx_view,
                 const RoutingView& routing, const GemmOptions& options) {
  const Argument dy{"dy", dy_view};
  const Argument w{"w", w_view};
  const Argument dx{"dx", dx_view};
  Describer call(Op::kDx, dy, routing, options);
  call.add_input(w, {3, 2});
  call.add_output(dx, {2});
  const std::int64_t rows = call.rows_of_dy(dy);
  call.take_scattered_rows(dx, rows);
  call.add_routing(rows);
  call.problem.n = rows_per_expert(w, call.problem.experts);
  call.problem.k = w_view.shape[w_view.rank - 1];
  require_shape(dy, {dy_view.shape[0], call.problem.n},
                call.problem.dy_per_token ? "[T, N]" : "[M, N]");
  require_output_shape(dx, call.problem, "[M, K]");
  call.operands.dy = dy_view.data;
  call.operands.dy_stride = dy_view.row_stride;
  call.operands.w = w_view.data;
  call.operands.w_stride = w_view.row_stride;
  return call.finish(w, dx, options);
}

Call describe_dw(const TensorView& dy_view, const TensorView& x_view, const TensorView& dw_view,
                 const RoutingView& routing, const GemmOptions& options) {
  const Argument dy{"dy", dy_view};
  const Argument x{"x", x_view};
  const Argument dw{"dw", dw_view};
  Describer call(Op::kDw, dy, routing, options);
  call.add_input(x, {2});
  call.add_output(dw, {3, 2});
  const std::int64_t rows = call.rows_of_dy(dy);
  call.require_x_rows(x, rows);
  call.add_routing(rows);
  call.problem.n = dy_view.shape[1];
  call.problem.k = x_view.shape[1];
  require_weights_shape(dw, call.problem);
  call.operands.dy = dy_view.data;
  call.operands.dy_stride = dy_view.row_stride;
  call.operands.x = x_view.data;
  call.operands.x_stride = x_view.row_stride;
  return call.finish(x, dw, options);
}

void validate(const Problem& problem) {
  validate_flags(problem);
  require_at_least("E", problem.experts, 1);
  require_at_least("N", problem.n, 1);
  require_at_least("K", problem.k, 1);
  require_at_least("M", problem.rows, 0);
  if (problem.slots >= 0 &&
      (problem.permutation == Permutation::kNone || problem.slots % problem.topk != 0)) {
    refuse_value("slots is ", problem.slots, " with ", to_string(problem.permutation),
                 "; it must be a multiple of topk = ", problem.topk, ", and -1 without indices");
  }
  if (problem.activation) {
    require_activation(*problem.activation, "the product", problem.features());
  }
  if (!is_floating(problem.dtype)) {
    refuse_type("dtype is ", to_string(problem.dtype), "; accepted are ",
                list_of_names(kFloatingFormats));
  }
  if (problem.out_dtype != problem.dtype && problem.out_dtype != DType::kFloat32) {
    refuse_type("out_dtype is ", to_string(problem.out_dtype), "; it must be dtype, ",
                to_string(problem.dtype), ", or fp32");
  }
  if (problem.accumulate && problem.out_dtype != DType::kFloat32) {
    refuse_type("out_dtype is ", to_string(problem.out_dtype), "; accumulate needs an fp32 output");
  }
  if (!is_index(problem.sizes_dtype)) {
    refuse_type("sizes_dtype is ", to_string(problem.sizes_dtype),
                "; accepted are int32 and int64");
  }
  if (!is_index(problem.index_dtype)) {
    refuse_type("index_dtype is ", to_string(problem.index_dtype),
                "; accepted are int32 and int64");
  }
  if (problem.weights_dtype != problem.dtype && problem.weights_dtype != DType::kFloat32) {
    refuse_type("weights_dtype is ", to_string(problem.weights_dtype), "; it must be dtype, ",
                to_string(problem.dtype), ", or fp32");
  }
  checked_product(checked_product(problem.experts, problem.n, "E * N"), problem.k, "E * N * K");
  checked_product(std::max(problem.rows, problem.slots), std::max(problem.n, problem.k),
                  "M * max(N, K)");
}

void validate(const KernelConfig& config, const Problem& problem) {
  require_at_least("block_rows", config.block_rows, 0);
  require_at_least("block_cols", config.block_cols, 0);
  require_at_least("block_depth", config.block_depth, 0);
  require_at_least("stages", config.stages, 0);
  const bool rows_gathered = problem.op == Op::kDx ? problem.gathers_dy() : problem.gathers_x();
  if (config.tma_load_rows.value_or(false) && rows_gathered) {
    refuse_value("tma_load_rows is on for ", to_string(problem.op), " with ",
                 to_string(problem.permutation),
                 "; TMA copies whole boxes and cannot load a gathered operand");
  }
  if (config.tma_load_weights.value_or(false) && problem.op == Op::kDw && problem.gathers_dy()) {
    refuse_value("tma_load_weights is on for dW with ", to_string(problem.permutation),
                 "; TMA copies whole boxes and cannot load a gathered operand");
  }
  if (config.tma_store.value_or(false) && problem.scatters()) {
    refuse_value("tma_store is on for ", to_string(problem.op), " with ",
                 to_string(problem.permutation),
                 "; TMA copies whole boxes and cannot store scattered rows");
  }
}

}  // namespace moegemm
