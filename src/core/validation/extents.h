#pragma once

#include <cstdint>

#include "moegemm/passes.h"
#include "moegemm/tensor.h"

/// Where tensors lie in memory, in bytes, and whether two of them share any.
namespace moegemm {

/// `rows` of equal length, `pitch` apart; a dense tensor is one row.
struct Extent {
  std::int64_t begin;
  std::int64_t rows;
  std::int64_t row;    // bytes of one row
  std::int64_t pitch;  // bytes from row to row

  std::int64_t end() const { return begin + (rows - 1) * pitch + row; }
};

/// `count` times the same, `step` bytes apart: what three strides come to; none of an empty stack.
/// Where no elements are adjacent along any of three dimensions, what lies between them counts too.
struct StackExtent {
  Extent first;
  std::int64_t count;
  std::int64_t step;

  std::int64_t end() const { return first.end() + (count - 1) * step; }
};

/// Of a tensor that is not empty.
Extent extent_of(const TensorView& view);
StackExtent extent_of(const StridedStack& stack);

bool overlap(const Extent& a, const Extent& b);
bool overlap(const StackExtent& a, const StackExtent& b);

}  // namespace moegemm
