#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "arguments.h"
#include "moegemm/passes.h"
#include "registration.h"
#include "runtime/execution.h"

namespace moegemm::torch_ops {
namespace {

using Shape = std::array<std::int64_t, 3>;

/// Any strides will do.
StridedStack stack_of(const char* name, const Tensor& tensor) {
  const Argument argument(name, tensor);
  const TensorView& view = argument.metadata();
  if (view.rank != 3) refuse_value(name, " is ", to_string(view), "; it must have 3 dimensions");
  std::int64_t* strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
  return {const_cast<void*>(readable_data(tensor.get())),
          view.dtype,
          view.shape,
          {strides[0], strides[1], strides[2]},
          view.device};
}

/// What lies `offset` elements further along a dimension.
StridedStack part_of(StridedStack stack, int dim, std::int64_t offset, std::int64_t length) {
  stack.data =
      static_cast<std::byte*>(stack.data) + offset * stack.strides[dim] * size_bytes(stack.dtype);
  stack.shape[dim] = length;
  return stack;
}

StridedStack dense(const Output& output) {
  const Shape& shape = output.view.shape;
  return {output.view.data,
          output.view.dtype,
          shape,
          {shape[1] * shape[2], shape[2], 1},
          output.view.device};
}

void require_count(const char* name, std::size_t count, std::size_t wanted) {
  if (count != wanted) refuse_value(name, " has ", count, " entries; it must have ", wanted);
}

void run(const std::vector<FactorCopy>& copies, Argument& m_sizes) {
  if (copies.empty()) return;
  double elements = 0;
  for (const FactorCopy& copy : copies) {
    const Shape& shape = copy.to.shape;
    elements += static_cast<double>(shape[0]) * static_cast<double>(shape[1] * shape[2]);
  }
  const Execution execution(copies.front().to.device, 2 * elements);
  copy_factors(copies, m_sizes.readable(), execution.context());
}

/// Result i has the next counts[i] of `parts` side by side along dimension ranks[i], each times its
/// scaling, dense and in the dtype of `like`, with zeros up to padded_rank of their ranks. With
/// m_sizes [E] results are undefined for experts that have no rows.
std::vector<Tensor> joined_factors(const std::vector<Tensor>& parts,
                                   const std::vector<double>& scalings,
                                   const std::vector<std::int64_t>& counts,
                                   const std::vector<std::int64_t>& ranks, const Tensor& like,
                                   const std::optional<Tensor>& m_sizes) {
  return raising([&] {
    Argument sizes("m_sizes", m_sizes);
    const DType dtype = Argument("like", like).dtype();
    require_count("scalings", scalings.size(), parts.size());
    require_count("ranks", ranks.size(), counts.size());
    std::vector<FactorCopy> copies;
    std::vector<Tensor> results;
    std::size_t at = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      const std::int64_t rank = ranks[i];
      if (rank != 1 && rank != 2) refuse_value("ranks[", i, "] is ", rank, "; it must be 1 or 2");
      if (counts[i] < 1 || counts[i] > static_cast<std::int64_t>(parts.size() - at)) {
        refuse_value("counts[", i, "] is ", counts[i], "; it must be between 1 and the ",
                     parts.size() - at, " parts that are left");
      }
      std::vector<StridedStack> stacks;
      std::int64_t joined = 0;
      for (std::int64_t part = 0; part < counts[i]; ++part) {
        stacks.push_back(stack_of("parts", parts[at + part]));
        joined += stacks.back().shape[rank];
      }
      Shape shape = stacks.front().shape;
      shape[rank] = padded_rank(joined);
      Output result = allocate(3, shape, dtype, stacks.front().device);
      std::int64_t offset = 0;
      for (std::int64_t part = 0; part < counts[i]; ++part) {
        const std::int64_t own = stacks[part].shape[rank];
        const bool last = part + 1 == counts[i];
        copies.push_back({stacks[part],
                          part_of(dense(result), static_cast<int>(rank), offset,
                                  last ? shape[rank] - offset : own),
                          static_cast<float>(scalings[at + part])});
        offset += own;
      }
      at += counts[i];
      results.push_back(result.hand_over());
    }
    require_count("parts", parts.size(), at);
    run(copies, sizes);
    return results;
  });
}

/// A new tensor without gaps whose dimensions lie in memory in the order of the stack's strides,
/// which become those of the tensor.
Tensor dense_like(StridedStack& stack) {
  std::array<int, 3> order = {0, 1, 2};  // the slowest first
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return stack.strides[a] > stack.strides[b]; });
  Shape stored = {};
  for (int at = 0; at < 3; ++at) stored[at] = stack.shape[order[at]];
  Tensor tensor = allocate(3, stored, stack.dtype, stack.device).hand_over();
  std::int64_t step = 1;
  for (int at = 2; at >= 0; --at) {
    stack.strides[order[at]] = step;
    step *= std::max<std::int64_t>(stored[at], 1);
  }
  for (int dim = 0; dim < 3; ++dim) {  // `order` says which dimension of the stack is where
    const auto at = static_cast<int>(std::find(order.begin(), order.end(), dim) - order.begin());
    if (at == dim) continue;
    tensor = torch::stable::transpose(tensor, dim, at);
    std::swap(order[dim], order[at]);
  }
  return tensor;
}

/// Each of `sources` times its scaling, in the dtype and, where that leaves no gaps, in the memory
/// layout of the tensor of the same shape in `like`.
std::vector<Tensor> scaled_like(const std::vector<Tensor>& sources, const std::vector<Tensor>& like,
                                const std::vector<double>& scalings) {
  return raising([&] {
    require_count("like", like.size(), sources.size());
    require_count("scalings", scalings.size(), sources.size());
    std::vector<FactorCopy> copies;
    std::vector<Tensor> results;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const StridedStack source = stack_of("sources", sources[i]);
      StridedStack target = stack_of("like", like[i]);
      if (source.shape != target.shape) {
        refuse_value("sources[", i, "] is ", to_string(Argument("sources", sources[i]).metadata()),
                     "; it must have the shape of like[", i, "], ",
                     to_string(Argument("like", like[i]).metadata()));
      }
      results.push_back(dense_like(target));
      target.data = results.back().mutable_data_ptr();
      copies.push_back({source, target, static_cast<float>(scalings[i])});
    }
    Argument none;
    run(copies, none);
    return results;
  });
}

/// See moegemm::factor_rows. What the launch ahead is promised to do:
/// rows_pending: LaunchAhead::kWritesRows; apart: kApart.
Tensor factor_rows(const Tensor& x, const Tensor& factor, const Tensor& m_sizes,
                   const std::optional<Tensor>& gather_indices, std::int64_t topk,
                   bool rows_pending, bool apart) {
  return raising([&] {
    Argument input("x", x), sizes("m_sizes", m_sizes), indices("gather_indices", gather_indices);
    const StridedStack stack = stack_of("factor", factor);
    const TensorView& readable_x = input.readable();
    const RoutingView routing{sizes.readable(), indices.readable(), {}, topk};
    const std::int64_t rows = indices.given() ? indices.size(0) : input.size(0);
    const Execution execution(input.device(), 0);
    Output out = allocate(rows, padded_rank(stack.shape[1]), input.dtype(), input.device());
    const bool copied = input.copied() || sizes.copied() || indices.copied();
    const LaunchAhead ahead = apart ? LaunchAhead::kApart : LaunchAhead::kWritesRows;
    moegemm::factor_rows(readable_x, stack, routing, out.view,
                         execution.context(ahead, (rows_pending || apart) && !copied));
    return out.hand_over();
  });
}

constexpr Operator kOperators[] = {
    {"factor_rows(Tensor x, Tensor factor, Tensor m_sizes, Tensor? gather_indices, int topk, "
     "bool rows_pending=False, bool apart=False) -> Tensor",
     TORCH_BOX(&factor_rows)},
    {"joined_factors(Tensor[] parts, float[] scalings, int[] counts, int[] ranks, Tensor like, "
     "Tensor? m_sizes) -> Tensor[]",
     TORCH_BOX(&joined_factors)},
    {"scaled_like(Tensor[] sources, Tensor[] like, float[] scalings) -> Tensor[]",
     TORCH_BOX(&scaled_like)},
};

}  // namespace

MOEGEMM_REGISTER(kOperators)

}  // namespace moegemm::torch_ops
