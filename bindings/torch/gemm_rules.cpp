#include "gemm_rules.h"

namespace moegemm::torch_ops {
namespace {

GemmOptions options_from(std::int64_t flags) {
  GemmOptions options;
  options.permute_x = (flags & kPermuteX) != 0;
  options.permute_y = (flags & kPermuteY) != 0;
  options.fuse_mul = (flags & kFuseMul) != 0;
  options.allow_tf32 = (flags & kAllowTf32) != 0;
  options.dy_per_token = (flags & kDyPerToken) != 0;
  options.check = (flags & kCheck) != 0;
  options.accumulate = (flags & kAccumulate) != 0;
  options.autotune = (flags & kAutotune) != 0;
  return options;
}

void require_columns(const Argument& argument, std::int64_t columns, const char* letter,
                     const Argument& source) {
  const std::int64_t got = argument.size(argument.rank() - 1);
  if (got != columns) {
    refuse_value(argument.name(), " is ", argument.describe(), "; its last dimension must be ",
                 letter, " = ", columns, " as in ", source.name(), " (", source.describe(), ")");
  }
}

void require_extent(const Argument& argument, std::int64_t extent, const char* letter) {
  if (extent < 1) {
    refuse_value(argument.name(), " is ", argument.describe(), "; ", letter, " must be at least 1");
  }
}

/// Rows per expert of W, which may be flattened to [E * N, K].
std::int64_t rows_per_expert(const Argument& w, std::int64_t experts) {
  if (w.rank() == 2) {
    if (w.size(0) % experts != 0) {
      refuse_value("W is ", w.describe(),
                   "; a flattened [E * N, K] needs a multiple of E = ", experts,
                   " rows, E being the length of m_sizes");
    }
    return w.size(0) / experts;
  }
  if (w.rank() != 3) {
    refuse_value("W is ", w.describe(), "; its shape must be [E, N, K] or [E * N, K]");
  }
  if (w.size(0) != experts) {
    refuse_value("W is ", w.describe(), "; it must have one matrix for each of the E = ", experts,
                 " entries of m_sizes");
  }
  return w.size(1);
}

}  // namespace

RoutingView RoutingArguments::readable() {
  RoutingView view;
  view.m_sizes = m_sizes.readable();
  if (gather_indices.given()) view.gather_indices = gather_indices.readable();
  if (topk_weights.given()) view.topk_weights = topk_weights.readable_vector();
  view.topk = topk;
  return view;
}

GemmArguments::GemmArguments(Op op, AtenTensorHandle first_tensor, AtenTensorHandle second_tensor,
                             AtenTensorHandle m_sizes, AtenTensorHandle gather_indices,
                             AtenTensorHandle topk_weights, std::int64_t topk, std::int64_t flags)
    : first(op == Op::kForward ? "X" : "dY", first_tensor),
      second(op == Op::kDw ? "X" : "W", second_tensor),
      options(options_from(flags)),
      op_(op),
      float32_output_((flags & kFloat32Output) != 0),
      warn_at_once_((flags & kWarnAtOnce) != 0) {
  first.require_floating();
  first.require_rank(2, op == Op::kForward ? "[T, K] or [M, K]" : "[M, N] or [T, N]");
  second.require_same_dtype(first);
  second.require_same_device(first);
  if (topk < 1) refuse_value("topk is ", topk, "; it must be at least 1");
  routing.topk = topk;
  routing.m_sizes = Argument("m_sizes", m_sizes);
  // Tensors that the flags give no part to play are not looked at.
  if (options.permute_x || options.permute_y) {
    routing.gather_indices = Argument("gather_indices", gather_indices);
  }
  if (options.fuse_mul) routing.topk_weights = Argument("topk_weights", topk_weights);
  if (options.dy_per_token && (op == Op::kForward || !options.permute_y)) {
    refuse_value("dy_per_token is set without a gathered dY; it needs permute_y of dX or dW");
  }
  check_routing(op == Op::kForward ? options.permute_x : options.dy_per_token);

  if (op == Op::kDw) {
    second.require_rank(2, "[T, K] or [M, K]");
    shape_.n = first.size(1);
    shape_.k = second.size(1);
    check_x_rows(second);
  } else {
    shape_.n = rows_per_expert(second, shape_.experts);
    shape_.k = second.size(second.rank() - 1);
    if (op == Op::kForward) {
      require_columns(first, shape_.k, "K", second);
      check_x_rows(first);
    } else if (first.size(1) != shape_.n) {
      refuse_value("dY is ", first.describe(), "; its last dimension must be N = ", shape_.n,
                   " as in W (", second.describe(), ") with E = ", shape_.experts);
    }
  }
  require_extent(op == Op::kForward ? second : first, shape_.n, "N");
  require_extent(second, shape_.k, "K");
  check_weights();
}

void GemmArguments::check_routing(bool first_has_tokens) {
  const Argument& m_sizes = routing.m_sizes;
  m_sizes.require_rank(1, "[E]");
  m_sizes.require_index();
  m_sizes.require_same_device(first);
  shape_.experts = m_sizes.size(0);
  require_extent(m_sizes, shape_.experts, "E");

  const Argument& indices = routing.gather_indices;
  shape_.rows = first.size(0);
  if (!options.permute_x && !options.permute_y) return;
  if (!indices.given()) {
    refuse_value("gather_indices is None; ", options.permute_x ? "permute_x" : "permute_y",
                 "=True needs it");
  }
  indices.require_rank(1, "[M]");
  indices.require_index();
  indices.require_same_device(first);
  // Where the first operand has one row per token, the indices say how many rows there are.
  if (first_has_tokens) shape_.rows = indices.size(0);
  if (indices.size(0) != shape_.rows) {
    refuse_value("gather_indices is ", indices.describe(), "; its length must be M = ", shape_.rows,
                 ", the rows of ", first.name());
  }
}

void GemmArguments::check_weights() {
  if (!options.fuse_mul) return;
  const Argument& weights = routing.topk_weights;
  if (!weights.given()) refuse_value("topk_weights is None; fuse_mul_post=True needs it");
  weights.require_dtype_or_float32(first);
  weights.require_same_device(first);
  const bool flat = weights.rank() == 1;
  const bool by_token = weights.rank() == 2 && weights.size(1) == routing.topk;
  if (!(flat || by_token) || weights.numel() != shape_.rows) {
    refuse_value("topk_weights is ", weights.describe(),
                 "; its shape must be [M] or [T, topk] with M = ", shape_.rows,
                 " and topk = ", routing.topk);
  }
}

void GemmArguments::check_x_rows(const Argument& x) const {
  if (!options.permute_x && x.size(0) != shape_.rows) {
    refuse_value("X is ", x.describe(), "; without permute_x it must have M = ", shape_.rows,
                 " rows");
  }
}

void GemmArguments::check_output(const Argument& output) const {
  output.require_same_device(first);
  output.require_dtype_or_float32(first);
  if (options.accumulate && output.dtype() != DType::kFloat32) {
    refuse_type("out has dtype ", to_string(output.dtype()), "; accumulate=True needs fp32");
  }
  if (op_ == Op::kDw) {
    const bool stacked = output.rank() == 3 && output.size(0) == shape_.experts &&
                         output.size(1) == shape_.n && output.size(2) == shape_.k;
    const bool flattened = output.rank() == 2 && output.size(0) == shape_.experts * shape_.n &&
                           output.size(1) == shape_.k;
    if (!stacked && !flattened) {
      refuse_value("out is ", output.describe(), "; its shape must be [E, N, K] = [",
                   shape_.experts, ", ", shape_.n, ", ", shape_.k, "] or the same flattened");
    }
    return;
  }
  const std::int64_t columns = op_ == Op::kForward ? shape_.n : shape_.k;
  // dX in flat order has T * topk rows, which its caller says.
  const bool flat = op_ == Op::kDx && options.permute_x;
  if (output.rank() != 2 || output.size(1) != columns ||
      (flat ? output.size(0) % routing.topk != 0 : output.size(0) != shape_.rows)) {
    refuse_value("out is ", output.describe(), "; its shape must be [", shape_.rows, ", ", columns,
                 "]");
  }
}

}  // namespace moegemm::torch_ops
