#include <cstddef>
#include <string>
#include <vector>

#include "core/factor_tiles.h"
#include "core/refusal.h"
#include "core/registry.h"
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

void require_stack(const char* name, std::size_t at, const StridedStack& stack) {
  const std::string which = join(name, " ", at);
  if (!is_floating(stack.dtype)) {
    refuse_type(which, " has dtype ", to_string(stack.dtype), "; bf16, fp16 or fp32 is accepted");
  }
  std::int64_t count = 1;
  for (int dim = 0; dim < 3; ++dim) {
    if (stack.shape[dim] < 0 || stack.strides[dim] < 0) {
      refuse_value(which, " has extent ", stack.shape[dim], " and stride ", stack.strides[dim],
                   " in dimension ", dim, "; neither may be negative");
    }
    count = checked_product(count, stack.shape[dim], which.c_str());
  }
  if (count > 0 && stack.data == nullptr) refuse_value(which, " has no data");
}

/// What the kernel of factor_rows does not take.
std::string why_not(const TensorView& x, const StridedStack& factor, const RoutingView& routing,
                    const TensorView& rows) {
  if (x.device.type != DeviceType::kCuda)
    return "x is on " + to_string(x.device) + ", not on a GPU";
  if (size_bytes(x.dtype) != 2) return join("x is ", to_string(x.dtype), ", not bf16 or fp16");
  if (routing.segments() != Segments::kPacked) return "segments do not follow one another";
  const std::int64_t k = x.shape[1];
  if (k % 8 != 0) return join("K = ", k, " is not a multiple of 8");
  const std::int64_t step = 16 / size_bytes(factor.dtype);
  const bool aligned = reinterpret_cast<std::uintptr_t>(factor.data) % 16 == 0 &&
                       factor.strides[0] % step == 0 && factor.strides[1] % step == 0;
  if (factor.strides[2] != 1 || !aligned || alignment_bytes(x) < 16 || alignment_bytes(rows) < 16) {
    return "rows are not aligned to 16 bytes with their columns side by side";
  }
  return {};
}

void require_copy(std::size_t at, const FactorCopy& copy, Device device) {
  require_stack("from", at, copy.from);
  require_stack("to", at, copy.to);
  for (const Device& own : {copy.from.device, copy.to.device}) {
    if (own != device) {
      refuse_value("copy ", at, " is on ", to_string(own), "; it must be on ", to_string(device),
                   " as the first one");
    }
  }
  for (int dim = 0; dim < 3; ++dim) {
    const std::int64_t from = copy.from.shape[dim], to = copy.to.shape[dim];
    if (from > to || (dim == kExperts && from != to)) {
      refuse_value("to ", at, " has extent ", to, " in dimension ", dim, "; it must have ",
                   dim == kExperts ? "" : "at least ", from, " as from");
    }
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

void copy_factors(std::span<const FactorCopy> copies, const TensorView& m_sizes,
                  const ExecutionContext& context) {
  if (copies.empty()) return;
  const Device device = copies.front().to.device;
  std::vector<FactorCopy> full;
  for (std::size_t at = 0; at < copies.size(); ++at) {
    const FactorCopy& copy = copies[at];
    require_copy(at, copy, device);
    const auto& shape = copy.to.shape;
    if (m_sizes.given()) {
      const Argument sizes{"m_sizes", m_sizes};
      require_form(sizes, {{1, "[E]"}});
      require_index(sizes);
      require_shape(sizes, {shape[kExperts]}, "[E]");
      if (m_sizes.device != device) {
        refuse_value("m_sizes is on ", to_string(m_sizes.device), "; it must be on ",
                     to_string(device));
      }
    }
    if (shape[0] > 0 && shape[1] > 0 && shape[2] > 0) full.push_back(copy);
  }
  if (full.empty()) return;
  passes_for(device);  // or a refusal
#if MOEGEMM_HAS_CUDA
  if (device.type == DeviceType::kCuda) return copy_factors_on_gpu(full, m_sizes, context);
#endif
  copy_factors_on_cpu(full, m_sizes, context);
}

void factor_rows(const TensorView& x_view, const StridedStack& factor, const RoutingView& routing,
                 const TensorView& rows_view, const ExecutionContext& context) {
  const Argument x{"x", x_view};
  const Argument rows{"rows", rows_view};
  const Argument indices{"gather_indices", routing.gather_indices};
  require_form(x, {{2, "[T, K] or [M, K]"}});
  require_floating(x);
  require_topk(routing.topk);
  const std::int64_t experts = require_segments(routing, x);
  require_stack("factor", 0, factor);
  if (factor.shape[0] != experts || factor.shape[2] != x_view.shape[1] ||
      factor.device != x_view.device ||
      (factor.dtype != x_view.dtype && factor.dtype != DType::kFloat32)) {
    refuse_value("factor is ", to_string(factor.dtype), "[", factor.shape[0], ", ", factor.shape[1],
                 ", ", factor.shape[2], "] on ", to_string(factor.device),
                 "; it must be [E, r, K] = [", experts, ", r, ", x_view.shape[1], "] in ",
                 to_string(x_view.dtype), " or fp32 on ", to_string(x_view.device));
  }
  std::int64_t count = x_view.shape[0];
  if (routing.gather_indices.given()) {
    require_indices(indices, x);
    count = routing.gather_indices.shape[0];
  }
  require_like(rows, x, {count, (factor.shape[1] + 7) / 8 * 8}, "[M, r rounded up to 8]");
  require_apart({&rows}, {&x, &indices});
  const std::string reason = why_not(x_view, factor, routing, rows_view);
  if (!reason.empty()) throw Error(ErrorKind::kNotImplemented, "factor_rows: " + reason);
  if (count == 0 || experts == 0 || rows_view.shape[1] == 0) return;
#if MOEGEMM_HAS_CUDA
  factor_rows_on_gpu(x_view, factor, routing, rows_view, context);
#else
  static_cast<void>(context);
#endif
}

}  // namespace moegemm
