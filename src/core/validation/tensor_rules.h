#pragma once

#include <cstdint>
#include <initializer_list>

#include "moegemm/epilogue.h"
#include "moegemm/ops.h"
#include "moegemm/tensor.h"

/// Rules about one tensor argument. Each throws moegemm::Error with the argument's name, what it is
/// and what is accepted, or returns.
namespace moegemm {

/// A tensor argument under the name that its caller knows it by.
struct Argument {
  const char* name;
  const TensorView& view;
};

/// A dtype, and the words before it in a refusal: "m_sizes has dtype int32" of a tensor,
/// "sizes_dtype is int32" of a member of Problem.
struct DTypeArgument {
  DTypeArgument(const Argument& argument)
      : name(argument.name), verb(" has dtype "), dtype(argument.view.dtype) {}
  DTypeArgument(const char* member, DType member_dtype)
      : name(member), verb(" is "), dtype(member_dtype) {}

  const char* name;
  const char* verb;
  DType dtype;
};

/// What a call says of its rows.
struct RoutingArguments {
  explicit RoutingArguments(const RoutingView& routing)
      : m_sizes{"m_sizes", routing.m_sizes},
        starts{"starts", routing.starts},
        indices{"gather_indices", routing.gather_indices},
        weights{"router_weights", routing.router_weights} {}

  Argument m_sizes;
  Argument starts;
  Argument indices;
  Argument weights;
};

/// A rank, and the shape with that rank in letters: "[M, N]".
struct Form {
  int rank;
  const char* letters;
};

/// Given, of one of these ranks, with extents that can be counted: none negative, and fewer than
/// 2^63 elements.
void require_form(const Argument& argument, std::initializer_list<Form> forms);
/// What that leaves open: rows at least their length apart, a byte count below 2^63, and data
/// unless it is empty. One that is not given passes.
void require_memory(const Argument& argument);

/// One of kFloatingFormats.
void require_floating(const DTypeArgument& argument);
/// One of kIndexFormats.
void require_index(const DTypeArgument& argument);
void require_same_dtype(const Argument& argument, const Argument& like);
/// `like`'s dtype or fp32. `like` may be a Problem.
void require_dtype_or_float32(const DTypeArgument& argument, const DTypeArgument& like);
void require_same_device(const Argument& argument, const Argument& like);
/// At least 1. `letter` is its name: "K".
void require_extent(const Argument& argument, std::int64_t extent, const char* letter);

/// Exactly this shape. `letters` writes it in letters: "[M, N]".
void require_shape(const Argument& argument, std::initializer_list<std::int64_t> shape,
                   const char* letters);

/// Exactly this shape, in `like`'s dtype, on its device.
void require_like(const Argument& argument, const Argument& like,
                  std::initializer_list<std::int64_t> shape, const char* letters);
/// The same, or in fp32.
void require_like_or_float32(const Argument& argument, const Argument& like,
                             std::initializer_list<std::int64_t> shape, const char* letters);

/// At least 1, and at most what kernels divide 32-bit indices by.
void require_topk(std::int64_t topk);

/// -1, no expectation, or a count.
void require_expected_rows(std::int64_t expected_rows);
/// [E] sizes on `like`'s device; returns E.
std::int64_t require_sizes(const Argument& m_sizes, const Argument& like);
/// The segments of a call: m_sizes, and what says where they are. Returns E.
std::int64_t require_segments(const RoutingView& routing, const Argument& like);
/// [M] indices on `like`'s device; M may be counted by somebody else.
void require_indices(const Argument& indices, const Argument& like);

/// One factor for each routed row: fp32 or `like`'s dtype, [M] or [T, topk], on `like`'s device.
void require_router_weights(const Argument& weights, const Argument& like, std::int64_t rows,
                            std::int64_t topk);
/// That they can be read as one vector.
void require_dense(const Argument& weights);

/// No byte of `output` is a byte of `input`; two column ranges of one buffer share none.
void require_disjoint(const Argument& output, const Argument& input);
[[noreturn]] void refuse_overlap(const Argument& output, const Argument& input);

/// An output that may be an input, element for element: each is read before it is written.
struct InPlace {
  const Argument* output = nullptr;
  const Argument* input = nullptr;
};
/// The memory of all of them, and no output in that of an input or of another output.
void require_apart(std::initializer_list<const Argument*> outputs,
                   std::initializer_list<const Argument*> inputs, const InPlace& allowed = {});

/// An activation of `columns` columns of a product: an even number with a gate, and numbers that
/// make sense. Returns the columns after it. `name` is what has the columns.
std::int64_t require_activation(const Activation& activation, const char* name,
                                std::int64_t columns);

/// That gates and ups may be two tensors, of which `w_up` is the second.
void require_halves(const char* w_up, const Activation& activation);

/// a * b, or a refusal that names what is being counted.
std::int64_t checked_product(std::int64_t a, std::int64_t b, const char* what);

/// Largest power of two, at most 16, that divides the address and the row pitch in bytes.
int alignment_bytes(const TensorView& view);

}  // namespace moegemm
