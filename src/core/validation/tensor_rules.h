#pragma once

#include <cstdint>
#include <initializer_list>

#include "moegemm/epilogue.h"
#include "moegemm/tensor.h"

/// Rules about one tensor argument. Each throws moegemm::Error with the argument's name, what it is
/// and what is accepted, or returns.
namespace moegemm {

/// A tensor argument under the name that its caller knows it by.
struct Argument {
  const char* name;
  const TensorView& view;
};

/// Given, of one of these ranks, with sizes that can be addressed: no negative extent, rows at
/// least their length apart, a byte count below 2^63, and data unless it is empty.
void require_tensor(const Argument& argument, std::initializer_list<int> ranks);

/// One of kFloatingFormats.
void require_floating(const Argument& argument);
/// int32 or int64.
void require_index(const Argument& argument);
void require_same_dtype(const Argument& argument, const Argument& like);
/// `like`'s dtype or fp32.
void require_dtype_or_float32(const Argument& argument, const Argument& like);
void require_same_device(const Argument& argument, const Argument& like);

/// Exactly this shape. `meaning` writes it in letters: "[M, N]".
void require_shape(const Argument& argument, std::initializer_list<std::int64_t> shape,
                   const char* meaning);

/// At least 1, and at most what kernels divide 32-bit indices by.
void require_topk(std::int64_t topk);

/// One factor per routed row: fp32 or `like`'s dtype, [M] or dense [T, topk], on `like`'s device.
void require_row_weights(const Argument& weights, const Argument& like, std::int64_t rows,
                         std::int64_t topk);

/// No byte of `output` is a byte of `input`, as far as their pitches tell: two dense tensors, or
/// two column ranges of one buffer. Other strided pairs are not looked into.
void require_disjoint(const Argument& output, const Argument& input);

/// An activation of `columns` columns of a product: an even number with a gate, and numbers that
/// make sense. Returns the columns behind it. `name` is what has the columns.
std::int64_t require_activation(const Activation& activation, const char* name,
                                std::int64_t columns);

/// a * b, or a refusal that names what is being counted.
std::int64_t checked_product(std::int64_t a, std::int64_t b, const char* what);

/// Largest power of two, at most 16, that divides the address and the row pitch in bytes.
int alignment_bytes(const TensorView& view);

}  // namespace moegemm
