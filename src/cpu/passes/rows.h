#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/element_type.h"
#include "cpu/routing_data.h"
#include "moegemm/passes.h"

/// What loops over the rows of tensors have in common.
namespace moegemm::cpu {

/// Rows of one worker, which should have `grain` of what each row has `per_row` of: several times
/// what waking a thread costs.
inline std::int64_t grain_rows(std::int64_t grain, std::int64_t per_row) {
  return std::max<std::int64_t>(1, grain / std::max<std::int64_t>(per_row, 1));
}

template <typename T>
T* row_of(const TensorView& view, std::int64_t row) {
  return static_cast<T*>(view.data) + row * view.row_stride;
}

/// Of a tensor that may not be given.
inline void zero_row(const TensorView& view, std::int64_t row) {
  if (!view.given()) return;
  with_element_type(view.dtype, [&]<typename T>(T*) {
    std::fill_n(row_of<T>(view, row), view.shape[1], T{});  // all bits zero is +0 in each format
  });
}

/// The flat row at position r in expert order, r itself without gather_indices; -1 if it is not one
/// of `rows`.
inline std::int64_t flat_row(const RoutingView& routing, std::int64_t r, std::int64_t rows) {
  const TensorView& indices = routing.gather_indices;
  const std::int64_t flat = indices.given() ? read_index(indices.data, indices.dtype, r) : r;
  return flat >= 0 && flat < rows ? flat : -1;
}

/// 1 where none are given.
inline float router_weight(const RoutingView& routing, std::int64_t flat) {
  const TensorView& weights = routing.router_weights;
  return weights.given() ? read_float(weights.data, weights.dtype, flat) : 1.0f;
}

}  // namespace moegemm::cpu
