#include "core/validation/extents.h"

#include <algorithm>
#include <array>

namespace moegemm {
namespace {

std::int64_t address_of(const void* data) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data));
}

/// Whether a row of `rows` has a byte in [begin, end).
bool meets(const Extent& rows, std::int64_t begin, std::int64_t end) {
  const std::int64_t from = begin - rows.begin - rows.row;  // rows that end before it do not count
  const std::int64_t first = from < 0 ? 0 : from / rows.pitch + 1;
  return first < rows.rows && rows.begin + first * rows.pitch < end;
}

Extent moved(Extent extent, std::int64_t bytes) {
  extent.begin += bytes;
  return extent;
}

/// Extent and stride of a dimension; one that is not walked adds nothing.
struct Dimension {
  std::int64_t count = 1;
  std::int64_t stride = 0;
};

}  // namespace

Extent extent_of(const TensorView& view) {
  const std::int64_t element = size_bytes(view.dtype);
  const std::int64_t length = view.shape[view.rank - 1];
  const std::int64_t begin = address_of(view.data);
  if (view.rank == 1 || view.row_stride == length) {
    const std::int64_t bytes = view.numel() * element;
    return {begin, 1, bytes, bytes};
  }
  return {begin, view.numel() / length, length * element, view.row_stride * element};
}

StackExtent extent_of(const StridedStack& stack) {
  const std::int64_t element = size_bytes(stack.dtype);
  std::array<Dimension, 3> walked = {};
  for (int dim = 0; dim < 3; ++dim) {
    if (stack.shape[dim] > 1 && stack.strides[dim] > 0) {
      walked[dim] = {stack.shape[dim], stack.strides[dim] * element};
    }
  }
  std::sort(walked.begin(), walked.end(),
            [](const Dimension& a, const Dimension& b) { return a.stride < b.stride; });
  // What lies dense becomes one row, and rows one distance apart become one pitch.
  std::int64_t row = element;
  std::array<Dimension, 3> left = {};
  int many = 0;
  for (const auto& [count, stride] : walked) {
    if (count == 1) continue;
    if (many == 0 && stride == row) {
      row *= count;
    } else if (many > 0 && stride == left[many - 1].count * left[many - 1].stride) {
      left[many - 1].count *= count;
    } else {
      left[many++] = {count, stride};
    }
  }
  if (many == 3) {
    row += (left[0].count - 1) * left[0].stride;
    left = {left[1], left[2]};
  }
  const auto [rows, pitch] = left[0];
  const bool empty = std::count(stack.shape.begin(), stack.shape.end(), 0) > 0;
  return {{address_of(stack.data), rows, row, rows > 1 ? pitch : row},
          empty ? 0 : left[1].count,
          left[1].stride};
}

bool overlap(const Extent& a, const Extent& b) {
  if (a.rows > b.rows) return overlap(b, a);
  if (a.end() <= b.begin || b.end() <= a.begin) return false;
  // Of one pitch the first rows that come near each other speak for all.
  const bool alike = a.pitch == b.pitch;
  const std::int64_t skipped = alike && b.begin > a.begin ? (b.begin - a.begin) / a.pitch : 0;
  const std::int64_t last = alike ? std::min(a.rows, skipped + 2) : a.rows;
  for (std::int64_t i = skipped; i < last; ++i) {
    const std::int64_t begin = a.begin + i * a.pitch;
    if (meets(b, begin, begin + a.row)) return true;
  }
  return false;
}

bool overlap(const StackExtent& a, const StackExtent& b) {
  if (a.end() <= b.first.begin || b.end() <= a.first.begin) return false;
  for (std::int64_t i = 0; i < a.count; ++i) {
    for (std::int64_t j = 0; j < b.count; ++j) {
      if (overlap(moved(a.first, i * a.step), moved(b.first, j * b.step))) return true;
    }
  }
  return false;
}

}  // namespace moegemm
