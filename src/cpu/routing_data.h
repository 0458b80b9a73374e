#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "moegemm/tensor.h"

/// Reads what the router wrote, by the rules for bad data: negative sizes count as 0, segments are
/// clipped at M. Nothing read here is trusted by more than that.
namespace moegemm::cpu {

inline std::int64_t read_index(const void* data, DType dtype, std::int64_t i) {
  return dtype == DType::kInt32 ? static_cast<const std::int32_t*>(data)[i]
                                : static_cast<const std::int64_t*>(data)[i];
}

inline void write_index(void* data, DType dtype, std::int64_t i, std::int64_t value) {
  if (dtype == DType::kInt32) {
    static_cast<std::int32_t*>(data)[i] = static_cast<std::int32_t>(value);
  } else {
    static_cast<std::int64_t*>(data)[i] = value;
  }
}

/// offsets[e] to offsets[e + 1] are the rows of expert e; offsets[experts] <= rows is where the
/// rows that belong to nobody begin.
inline std::vector<std::int64_t> segment_offsets(const void* m_sizes, DType dtype,
                                                 std::int64_t experts, std::int64_t rows) {
  std::vector<std::int64_t> offsets(experts + 1, 0);
  for (std::int64_t e = 0; e < experts; ++e) {
    const std::int64_t size = std::max<std::int64_t>(read_index(m_sizes, dtype, e), 0);
    offsets[e + 1] = offsets[e] + std::min(size, rows - offsets[e]);
  }
  return offsets;
}

}  // namespace moegemm::cpu
