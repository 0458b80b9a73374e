#pragma once

#include <cstdint>
#include <optional>

#include "moegemm/tensor.h"

namespace moegemm {

/// The first row for which a capacity has no place.
struct DroppedRow {
  std::int64_t routed = 0;  ///< rows that have an expert
  std::int64_t expert = 0;
  std::int64_t token = 0;
  std::int64_t slot = 0;
};

/// Of ids in host memory; `tokens` of them count.
std::optional<DroppedRow> find_dropped_row(const TensorView& expert_ids, std::int64_t experts,
                                           std::int64_t tokens, std::int64_t capacity);

}  // namespace moegemm
