#include "core/validation/tensor_rules.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/refusal.h"
#include "core/types/names.h"
#include "core/validation/extents.h"

namespace moegemm {
namespace {

std::int64_t columns(const TensorView& view) { return view.shape[view.rank - 1]; }

bool same_memory(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.row_stride == b.row_stride;
}

}  // namespace

void require_form(const Argument& argument, std::initializer_list<Form> forms) {
  const TensorView& view = argument.view;
  const char* name = argument.name;
  if (!view.given()) refuse_value(name, " is not given, but this call needs it");
  if (std::none_of(forms.begin(), forms.end(),
                   [&](const Form& form) { return form.rank == view.rank; })) {
    std::string accepted;
    for (const Form& form : forms) accepted += join(accepted.empty() ? "" : " or ", form.letters);
    refuse_value(name, " is ", to_string(view), "; its shape must be ", accepted);
  }
  std::int64_t elements = 1;
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] < 0) {
      refuse_value(name, " has shape[", i, "] = ", view.shape[i], "; extents must not be negative");
    }
    if (__builtin_mul_overflow(elements, view.shape[i], &elements)) {
      refuse_value(name, " is ", to_string(view), ": its element count does not fit in 64 bits");
    }
  }
}

void require_memory(const Argument& argument) {
  const TensorView& view = argument.view;
  const char* name = argument.name;
  const std::int64_t elements = view.numel();
  if (elements == 0) return;
  const std::int64_t length = columns(view);
  std::int64_t reach = elements;
  if (view.rank > 1) {
    if (view.row_stride < length) {
      refuse_value(name, " has row_stride ", view.row_stride,
                   "; it must be at least the row length ", length);
    }
    if (__builtin_mul_overflow(elements / length, view.row_stride, &reach)) {
      reach = std::numeric_limits<std::int64_t>::max();
    }
  }
  if (reach > std::numeric_limits<std::int64_t>::max() / size_bytes(view.dtype)) {
    refuse_value(name, " is ", to_string(view), ": its byte count does not fit in 64 bits");
  }
  if (view.data == nullptr && view.device.type != DeviceType::kMeta) {
    refuse_value(name, " is ", to_string(view),
                 " with a null data pointer; only an empty tensor may have none");
  }
}

void require_floating(const DTypeArgument& argument) {
  if (!is_floating(argument.dtype)) {
    refuse_type(argument.name, argument.verb, to_string(argument.dtype), "; accepted are ",
                list_of_names(kFloatingFormats));
  }
}

void require_index(const DTypeArgument& argument) {
  if (!is_index(argument.dtype)) {
    refuse_type(argument.name, argument.verb, to_string(argument.dtype), "; accepted are ",
                list_of_names(kIndexFormats));
  }
}

void require_same_dtype(const Argument& argument, const Argument& like) {
  if (argument.view.dtype != like.view.dtype) {
    refuse_type(argument.name, " has dtype ", to_string(argument.view.dtype), "; it must have ",
                to_string(like.view.dtype), ", the dtype of ", like.name);
  }
}

void require_dtype_or_float32(const DTypeArgument& argument, const DTypeArgument& like) {
  if (argument.dtype != like.dtype && argument.dtype != DType::kFloat32) {
    refuse_type(argument.name, argument.verb, to_string(argument.dtype), "; accepted are fp32 and ",
                to_string(like.dtype), ", the dtype of ", like.name);
  }
}

void require_same_device(const Argument& argument, const Argument& like) {
  if (argument.view.device != like.view.device) {
    refuse_type(argument.name, " is on ", to_string(argument.view.device), "; it must be on ",
                to_string(like.view.device), ", where ", like.name, " is");
  }
}

void require_extent(const Argument& argument, std::int64_t extent, const char* letter) {
  if (extent < 1) {
    refuse_value(argument.name, " is ", to_string(argument.view), "; ", letter,
                 " must be at least 1");
  }
}

void require_shape(const Argument& argument, std::initializer_list<std::int64_t> shape,
                   const char* letters) {
  const TensorView& view = argument.view;
  if (view.rank == static_cast<int>(shape.size()) &&
      std::equal(shape.begin(), shape.end(), view.shape.begin())) {
    return;
  }
  std::string expected;
  for (const std::int64_t size : shape) {
    expected += join(expected.empty() ? "[" : ", ", size);
  }
  expected += "]";
  refuse_value(argument.name, " is ", to_string(view), "; its shape must be ", letters,
               expected == letters ? "" : " = " + expected);
}

void require_like(const Argument& argument, const Argument& like,
                  std::initializer_list<std::int64_t> shape, const char* letters) {
  require_form(argument, {{static_cast<int>(shape.size()), letters}});
  require_same_dtype(argument, like);
  require_same_device(argument, like);
  require_shape(argument, shape, letters);
}

void require_like_or_float32(const Argument& argument, const Argument& like,
                             std::initializer_list<std::int64_t> shape, const char* letters) {
  require_form(argument, {{static_cast<int>(shape.size()), letters}});
  require_dtype_or_float32(argument, like);
  require_same_device(argument, like);
  require_shape(argument, shape, letters);
}

void require_expected_rows(std::int64_t expected_rows) {
  if (expected_rows < -1) {
    refuse_value("expected_rows is ", expected_rows, "; it must not be negative");
  }
}

std::int64_t require_sizes(const Argument& m_sizes, const Argument& like) {
  require_form(m_sizes, {{1, "[E]"}});
  require_index(m_sizes);
  require_same_device(m_sizes, like);
  require_extent(m_sizes, m_sizes.view.shape[0], "E");
  return m_sizes.view.shape[0];
}

std::int64_t require_segments(const RoutingView& routing, const Argument& like) {
  const Argument m_sizes{"m_sizes", routing.m_sizes};
  const std::int64_t experts = require_sizes(m_sizes, like);
  require_expected_rows(routing.expected_rows);
  if (!routing.starts.given()) return experts;
  const Argument starts{"starts", routing.starts};
  require_form(starts, {{1, "[E]"}});
  require_same_dtype(starts, m_sizes);
  require_same_device(starts, m_sizes);
  require_shape(starts, {experts}, "[E]");
  if (routing.ends) refuse_value("starts is given with ends; ends say where segments begin, too");
  return experts;
}

void require_indices(const Argument& indices, const Argument& like) {
  require_form(indices, {{1, "[M]"}});
  require_index(indices);
  require_same_device(indices, like);
}

void require_router_weights(const Argument& weights, const Argument& like, std::int64_t rows,
                            std::int64_t topk) {
  constexpr const char* kMatrix = "[T, topk]";
  require_form(weights, {{1, "[M]"}, {2, kMatrix}});
  require_dtype_or_float32(weights, like);
  require_same_device(weights, like);
  const TensorView& view = weights.view;
  const bool by_token = view.rank == 2 && view.shape[1] == topk;
  if ((view.rank == 1 || by_token) && view.numel() == rows) return;
  refuse_value(weights.name, " is ", to_string(view), "; its shape must be [M] or ", kMatrix,
               " with M = ", rows, " and topk = ", topk);
}

void require_dense(const Argument& weights) {
  const TensorView& view = weights.view;
  if (view.rank == 2 && view.row_stride != view.shape[1] && view.shape[0] > 1) {
    refuse_value(weights.name, " has row_stride ", view.row_stride,
                 "; its rows must be dense: row_stride = topk = ", view.shape[1]);
  }
}

void require_disjoint(const Argument& output, const Argument& input) {
  if (output.view.numel() == 0 || input.view.numel() == 0) return;
  if (output.view.device.type == DeviceType::kMeta) return;
  if (overlap(extent_of(output.view), extent_of(input.view))) refuse_overlap(output, input);
}

void refuse_overlap(const Argument& output, const Argument& input) {
  refuse_value(output.name, " overlaps ", input.name,
               " in memory; the output must be separate from every input");
}

void require_apart(std::initializer_list<const Argument*> outputs,
                   std::initializer_list<const Argument*> inputs, const InPlace& allowed) {
  for (const Argument* input : inputs) require_memory(*input);
  for (const Argument* output : outputs) require_memory(*output);
  for (const Argument* const* output = outputs.begin(); output != outputs.end(); ++output) {
    for (const Argument* input : inputs) {
      const bool in_place = *output == allowed.output && input == allowed.input &&
                            same_memory((*output)->view, input->view);
      if (!in_place) require_disjoint(**output, *input);
    }
    for (const Argument* const* other = outputs.begin(); other != output; ++other) {
      require_disjoint(**output, **other);
    }
  }
}

std::int64_t require_activation(const Activation& activation, const char* name,
                                std::int64_t columns) {
  if (activation.gated() && columns % 2 != 0) {
    refuse_value(name, " has ", columns,
                 " columns; with a gate they must be even, gate and up in equal numbers");
  }
  if (!(activation.limit > 0)) {  // a NaN too
    refuse_value("limit is ", activation.limit, "; it must be positive");
  }
  if (!std::isfinite(activation.alpha)) {
    refuse_value("alpha is ", activation.alpha, "; it must be finite");
  }
  if (!std::isfinite(activation.up_offset)) {
    refuse_value("up_offset is ", activation.up_offset, "; it must be finite");
  }
  return activation.activated_columns(columns);
}

void require_halves(const char* w_up, const Activation& activation) {
  if (activation.layout != GateLayout::kConcatenated) {
    refuse_value(w_up, " is given with activation ", to_string(activation),
                 "; gates and ups in two tensors are those of a gated activation, concatenated");
  }
}

void require_topk(std::int64_t topk) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (topk < 1) refuse_value("topk is ", topk, "; it must be at least 1");
  if (topk > kMost) refuse_value("topk is ", topk, "; it must be at most ", kMost);
}

std::int64_t checked_product(std::int64_t a, std::int64_t b, const char* what) {
  std::int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) {
    refuse_value(what, " = ", a, " * ", b, " does not fit in 64 bits");
  }
  return result;
}

int alignment_bytes(const TensorView& view) {
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(view.data) | 16u;
  if (view.rank > 1) bits |= static_cast<std::uint64_t>(view.row_stride * size_bytes(view.dtype));
  return static_cast<int>(bits & (~bits + 1));  // the lowest set bit
}

}  // namespace moegemm
