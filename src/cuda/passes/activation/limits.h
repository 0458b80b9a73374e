#pragma once

#include <cstdint>
#include <string>

#include "cuda/backend/device_facts.h"
#include "cuda/passes/activation/row_experts.cuh"
#include "moegemm/error.h"

namespace moegemm::cuda {

/// Rows and columns are counted in 32 bits, with room for a step past the end, and a block keeps
/// the experts' prefix sums in shared memory, beside `shared_bytes` of other things: at least
/// 45,000 experts on Hopper.
inline void require_activation_limits(std::int64_t rows, std::int64_t columns, std::int64_t experts,
                                      int shared_bytes, Device device) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  const std::int64_t most_experts =
      (device_facts(device.index)->shared_memory_bytes - shared_bytes - kRowPrefixStaticBytes) /
          static_cast<std::int64_t>(sizeof(int)) -
      1;
  if (rows > kMost || columns > kMost || experts > most_experts) {
    throw Error(ErrorKind::kNotImplemented,
                "activations on a GPU take at most 2^30 rows, 2^30 columns and " +
                    std::to_string(most_experts) + " experts, got " + std::to_string(rows) + ", " +
                    std::to_string(columns) + " and " + std::to_string(experts));
  }
}

}  // namespace moegemm::cuda
