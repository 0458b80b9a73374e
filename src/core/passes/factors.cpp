#include <cstddef>
#include <string>
#include <vector>

#include "core/factor_tiles.h"
#include "core/refusal.h"
#include "core/registry.h"
#include "core/validation/extents.h"
#include "core/validation/tensor_rules.h"
#include "moegemm/passes.h"

namespace moegemm {
namespace {

constexpr int kExperts = 0;

/// The dimension that memory runs along: the smallest stride of those that are walked. `preferred`
/// where it is as good as any.
int fast_dimension(const StridedStack& stack, int preferred) {
  int fast = preferred;
  for (int dim = 0; dim < 3; ++dim) {
    if (stack.shape[dim] <= 1) continue;
    if (stack.shape[fast] <= 1 || stack.strides[dim] < stack.strides[fast]) fast = dim;
  }
  return fast;
}

FactorSide one_dimension(const FactorCopy& copy, int dim) {
  FactorSide side;
  side.inner = copy.to.shape[dim];
  side.given_inner = copy.from.shape[dim];
  side.from_inner = copy.from.strides[dim];
  side.to_inner = copy.to.strides[dim];
  side.inner_is_expert = dim == kExperts;
  return side;
}

FactorSide two_dimensions(const FactorCopy& copy, int outer, int inner) {
  FactorSide side = one_dimension(copy, inner);
  side.outer = copy.to.shape[outer];
  side.given_outer = copy.from.shape[outer];
  side.from_outer = copy.from.strides[outer];
  side.to_outer = copy.to.strides[outer];
  side.outer_is_expert = outer == kExperts;
  return side;
}

/// What the rules about tensors need to know of it.
TensorView shape_of(const StridedStack& stack) {
  const auto& shape = stack.shape;
  return TensorView::stack(stack.data, stack.dtype, shape[0], shape[1], shape[2], 0, stack.device);
}

void require_stack(const Argument& argument, const StridedStack& stack) {
  require_form(argument, {{3, "[E, rows, columns]"}});
  require_floating(argument);
  for (int dim = 0; dim < 3; ++dim) {
    if (stack.strides[dim] < 0) {
      refuse_value(argument.name, " has stride ", stack.strides[dim], " in dimension ", dim,
                   "; strides must not be negative");
    }
  }
  require_memory(argument);
}

void require_copy(std::size_t at, const FactorCopy& copy, const Argument& lead) {
  const std::string from_name = join("from ", at), to_name = join("to ", at);
  const TensorView from_view = shape_of(copy.from), to_view = shape_of(copy.to);
  const Argument from{from_name.c_str(), from_view}, to{to_name.c_str(), to_view};
  require_stack(from, copy.from);
  require_stack(to, copy.to);
  require_same_device(from, lead);
  require_same_device(to, lead);
  for (int dim = 0; dim < 3; ++dim) {
    const std::int64_t given = copy.from.shape[dim], taken = copy.to.shape[dim];
    if (given > taken || (dim == kExperts && given != taken)) {
      refuse_value(to.name, " has extent ", taken, " in dimension ", dim, "; it must have ",
                   dim == kExperts ? "" : "at least ", given, " as ", from.name);
    }
  }
}

/// No `to` is in the memory of another tensor.
void require_apart(std::span<const FactorCopy> copies, const TensorView& m_sizes) {
  if (copies.front().to.device.type == DeviceType::kMeta) return;
  std::vector<StackExtent> from, to;
  for (const FactorCopy& copy : copies) {
    from.push_back(extent_of(copy.from));
    to.push_back(extent_of(copy.to));
  }
  const auto refuse = [](std::size_t at, const std::string& other) {
    const std::string name = join("to ", at);
    const TensorView none;
    refuse_overlap({name.c_str(), none}, {other.c_str(), none});
  };
  for (std::size_t at = 0; at < copies.size(); ++at) {
    for (std::size_t other = 0; other < copies.size(); ++other) {
      if (overlap(to[at], from[other])) refuse(at, join("from ", other));
      if (other < at && overlap(to[at], to[other])) refuse(at, join("to ", other));
    }
    if (m_sizes.given() && overlap(to[at], {extent_of(m_sizes), 1, 0})) refuse(at, "m_sizes");
  }
}

}  // namespace

FactorTiles factor_tiles(const FactorCopy& copy) {
  const int to = fast_dimension(copy.to, 2);
  const int from = fast_dimension(copy.from, to);
  if (from == to) {
    const int outer = to == 0 ? 1 : 0;
    return {one_dimension(copy, to), two_dimensions(copy, outer, 3 - to - outer), false};
  }
  // The dimension that is left goes with the one that is not the experts: those two lie together.
  const int left = 3 - from - to;
  if (to == kExperts) {
    return {two_dimensions(copy, left, from), one_dimension(copy, to), true};
  }
  return {one_dimension(copy, from), two_dimensions(copy, left, to), true};
}

void copy_factors(std::span<const FactorCopy> copies, const TensorView& m_sizes_view,
                  const ExecutionContext& context) {
  if (copies.empty()) return;
  const TensorView lead_view = shape_of(copies.front().to);
  const Argument lead{"to 0", lead_view}, m_sizes{"m_sizes", m_sizes_view};
  std::vector<FactorCopy> full;
  for (std::size_t at = 0; at < copies.size(); ++at) {
    const FactorCopy& copy = copies[at];
    require_copy(at, copy, lead);
    if (m_sizes_view.given()) {
      require_form(m_sizes, {{1, "[E]"}});
      require_index(m_sizes);
      require_same_device(m_sizes, lead);
      require_shape(m_sizes, {copy.to.shape[kExperts]}, "[E]");
    }
    if (shape_of(copy.to).numel() > 0) full.push_back(copy);
  }
  require_memory(m_sizes);
  require_apart(copies, m_sizes_view);
  if (!full.empty()) passes_for(lead_view.device).copy_factors(full, m_sizes_view, context);
}

void factor_rows(const TensorView& x_view, const StridedStack& stack, const RoutingView& routing,
                 const TensorView& rows_view, const ExecutionContext& context) {
  const TensorView factor_view = shape_of(stack);
  const Argument x{"x", x_view};
  const Argument factor{"factor", factor_view};
  const Argument rows{"rows", rows_view};
  const auto [m_sizes, starts, indices, weights] = RoutingArguments(routing);
  require_form(x, {{2, "[T, K] or [M, K]"}});
  require_floating(x);
  require_topk(routing.topk);
  const std::int64_t experts = require_segments(routing, x);
  require_stack(factor, stack);
  require_dtype_or_float32(factor, x);
  require_same_device(factor, x);
  const std::int64_t rank = stack.shape[1];
  require_shape(factor, {experts, rank, x_view.shape[1]}, "[E, r, K]");
  std::int64_t count = x_view.shape[0];
  if (routing.gather_indices.given()) {
    require_indices(indices, x);
    count = routing.gather_indices.shape[0];
  }
  require_like(rows, x, {count, padded_rank(rank)}, "[M, r rounded up]");
  require_apart({&rows}, {&x, &m_sizes, &starts, &indices});
  const bool written = rows_view.numel() > 0 && rows_view.device.type != DeviceType::kMeta;
  if (written && overlap({extent_of(rows_view), 1, 0}, extent_of(stack))) {
    refuse_overlap(rows, factor);
  }
  passes_for(x_view.device).factor_rows(x_view, stack, routing, rows_view, context);
}

}  // namespace moegemm
